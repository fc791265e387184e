// SPDX-License-Identifier: Apache-2.0
// CUDA C++ on the host, for tests: what the kernels and their launcher use of the CUDA runtime, with the same names.
//
// A launch runs its blocks one after another and returns when all are done. The threads of a block are fibers: one runs
// until it ends or waits at a barrier, then the next one does. What a GPU would report, the launch returns: a
// misaligned address, a configuration out of range. Host sanitizers see every access as the thread's own.
//
// Not modelled: races between blocks, the order of writes to memory, warps that run divergent code in parallel.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define CUDART_VERSION 13000

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__ &  // the threads share one copy

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorMisalignedAddress = 716,
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

namespace emulation {

enum class Order { kForward, kBackward, kShuffled };

struct Launch {
  unsigned blocks, threads;
  size_t parameter_bytes;
  void* stream;
  std::vector<char> parameters;           // their bytes, and
  std::vector<std::vector<char>> memory;  // whatever else before_launch keeps
};

// What tests set and read. One OS thread's launches do not see another's.
struct Settings {
  Order order = Order::kForward;
  bool execute = true;      // false: a launch is only counted
  int64_t first_block = 0;  // of each launch, those that run; a negative one counts from the last
  int multiprocessors = 132;
  std::function<void(Launch&)> before_launch;  // set: parameters are recorded too
  cudaError_t fail_with = cudaSuccess;         // what the next launch returns, once, without running
};
inline thread_local Settings settings;
inline thread_local std::vector<Launch> launches;
inline thread_local int64_t wide_accesses = 0, narrow_accesses = 0;  // of 16 bytes, and of fewer
inline thread_local cudaError_t fault = cudaSuccess;                 // of the running launch

void run(dim3 grid, dim3 block, const std::function<void()>& thread);
void wait_for_block(int line);

// Counts an access; false if the address is not a multiple of its size.
bool check_access(const void* address, size_t bytes);

template <class T>
T load(const T* address) {
  return check_access(address, sizeof(T)) ? *address : T{};
}

}  // namespace emulation

template <class T>
T __ldcs(const T* address) {
  return emulation::load(address);
}
template <class T>
T __ldca(const T* address) {
  return emulation::load(address);
}
template <class T>
void __stwb(T* address, T value) {
  if (emulation::check_access(address, sizeof(T))) *address = value;
}
template <class T>
T atomicAdd(T* address, T value) {
  return std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
}
#define __syncthreads() emulation::wait_for_block(__LINE__)

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t stream) {
  using namespace emulation;
  if (settings.fail_with != cudaSuccess) return std::exchange(settings.fail_with, cudaSuccess);
  static_assert(sizeof...(Parameters) >= 1);
  constexpr size_t kBytes = (sizeof(std::remove_reference_t<Parameters>) + ... + 0);
  static_assert(kBytes <= 32764, "more than a launch takes");
  if (grid.x == 0 || grid.x > 0x7fffffffu || block.x == 0 || block.x > 1024) return cudaErrorInvalidConfiguration;
  Launch& launch = launches.emplace_back(Launch{grid.x, block.x, kBytes, stream, {}, {}});
  if (settings.before_launch) {
    const char* const bytes = static_cast<const char*>(arguments[0]);
    launch.parameters.assign(bytes, bytes + kBytes);
    settings.before_launch(launch);
  }
  if (!settings.execute) return cudaSuccess;
  fault = cudaSuccess;
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    run(grid, block, [&] { kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[kIndex])...); });
  }(std::index_sequence_for<Parameters...>{});
  return fault;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulation::settings.multiprocessors;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorMisalignedAddress: return "misaligned address";
  }
  return "unrecognized error code";
}

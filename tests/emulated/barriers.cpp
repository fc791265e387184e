// SPDX-License-Identifier: Apache-2.0
// A block reduction, right or with a fault: what the emulation must see. FAULT 1: no barrier. 2: a divergent barrier.
// 3: threads wait at different barriers.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

__global__ void sum(const float* values, int count, float* result) {
  __shared__ float partial[128];
  float own = 0;
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) own += __ldcs(values + i);
  partial[threadIdx.x] = own;
#if FAULT == 0
  __syncthreads();
#elif FAULT == 2
  if (threadIdx.x < 64) __syncthreads();
#elif FAULT == 3
  if (threadIdx.x < 64)
    __syncthreads();
  else
    __syncthreads();
#endif
  if (threadIdx.x == 0) {
    float total = 0;
    for (unsigned i = 0; i < blockDim.x; ++i) total += partial[i];
    __stwb(result + blockIdx.x, total);
  }
}

int main(int argc, char** argv) {
  using emulation::Order;
  const bool backward = argc > 1 && std::strcmp(argv[1], "backward") == 0;
  const bool shuffled = argc > 1 && std::strcmp(argv[1], "shuffled") == 0;
  emulation::settings.order = backward ? Order::kBackward : shuffled ? Order::kShuffled : Order::kForward;
  float values[1000], results[3] = {};
  for (int i = 0; i < 1000; ++i) values[i] = float(i);
  const float* source = values;
  float* result = results;
  int count = 1000;
  void* arguments[] = {&source, &count, &result};
  if (cudaLaunchKernel(sum, dim3(3), dim3(128), arguments, 0, nullptr) != cudaSuccess) return 1;
  for (float total : results)
    if (total != 499500.0f) return std::printf("wrong sum %g\n", double(total)), 1;
  return 0;
}

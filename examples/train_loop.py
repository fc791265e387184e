# SPDX-License-Identifier: Apache-2.0
"""The one-line swap in a plain training loop: fits a small network to a noisy sine. Runs in a few seconds."""

import torch
from torch import nn

from fused_ops import optim  # was: from torch import optim


def train(steps: int = 300) -> list[float]:
    torch.manual_seed(0)
    inputs = torch.linspace(-3, 3, 512).unsqueeze(1)  # [512, 1]
    targets = torch.sin(2 * inputs) + 0.05 * torch.randn_like(inputs)

    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss: {losses[0]:.4f} at the start, {losses[-1]:.4f} at the end")

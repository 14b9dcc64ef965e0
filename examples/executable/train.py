"""A script with arguments that does not use TuneMQ: it prints its measurements."""

from __future__ import annotations

import argparse


def main() -> None:
    """Fit a line to a few points."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    data = [(x / 10, 3 * x / 10) for x in range(10)]
    weight = speed = 0.0
    for epoch in range(options.epochs):
        slope = sum(2 * x * (weight * x - y) for x, y in data) / len(data)
        speed = options.momentum * speed - options.lr * slope
        weight += speed
        loss = sum((weight * x - y) ** 2 for x, y in data) / len(data)
        print(f"Epoch {epoch + 1}/{options.epochs} - loss: {loss:.6f} - weight: {weight:.4f}")


if __name__ == "__main__":
    main()

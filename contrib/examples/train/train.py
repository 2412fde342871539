"""Train a small classifier on real data: 1,797 handwritten digits that scikit-learn ships. Exits 1 below MIN_ACCURACY."""

import json
import os
import sys
import time

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

EPOCHS = int(os.environ.get("EPOCHS", "12"))
MIN_ACCURACY = float(os.environ.get("MIN_ACCURACY", "0.9"))


def save(path, write):
    """Never half a file: what is collected after a kill is the last whole one."""
    with open(path + ".tmp", "wb") as file:
        write(file)
    os.replace(path + ".tmp", path)


def main():
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16.0, labels, test_size=0.25, random_state=0, stratify=labels)
    model = MLPClassifier(hidden_layer_sizes=(64,), batch_size=32, learning_rate_init=0.003, random_state=0)
    print(f"{len(images)} images to learn from, {len(test_images)} to test with, {EPOCHS} epochs")

    start, accuracy = time.monotonic(), 0.0
    with open("metrics.jsonl", "w", buffering=1) as metrics:   # line by line: a job that is stopped keeps what it has measured
        for epoch in range(1, EPOCHS + 1):
            model.partial_fit(images, labels, classes=np.unique(labels))
            accuracy = float(model.score(test_images, test_labels))
            line = {"epoch": epoch, "loss": round(float(model.loss_), 5), "accuracy": round(accuracy, 5),
                    "seconds": round(time.monotonic() - start, 3)}
            metrics.write(json.dumps(line) + "\n")
            print(f"epoch {epoch:2d}  loss {model.loss_:.4f}  accuracy {accuracy:.4f}")
            arrays = {f"{kind}{layer}": array for kind, layers in (("weights", model.coefs_), ("bias", model.intercepts_))
                      for layer, array in enumerate(layers)}
            save("checkpoint.npz", lambda file: np.savez(file, epoch=epoch, **arrays))

    good = accuracy >= MIN_ACCURACY
    final = {"accuracy": accuracy, "min_accuracy": MIN_ACCURACY, "good": good, "epochs": EPOCHS, "seconds": time.monotonic() - start}
    save("final_metrics.json", lambda file: file.write(json.dumps(final, indent=1).encode() + b"\n"))
    print(f"accuracy {accuracy:.4f}: {'good' if good else f'below {MIN_ACCURACY}'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

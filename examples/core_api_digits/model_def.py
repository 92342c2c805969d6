"""Train a small network on scikit-learn's handwritten digits: plain PyTorch, nothing else."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

NUM_TEST_IMAGES = 360


class Net(nn.Module):
    """Two convolutions and two linear layers; takes [batch, 1, 8, 8], gives [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.conv1(images))
        hidden = functional.max_pool2d(functional.relu(self.conv2(hidden)), 2)
        hidden = functional.relu(self.fc1(self.dropout(hidden.flatten(1))))
        return self.fc2(self.dropout(hidden))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-NUM_TEST_IMAGES], labels[:-NUM_TEST_IMAGES])
    test = TensorDataset(images[-NUM_TEST_IMAGES:], labels[-NUM_TEST_IMAGES:])
    return train, test


def train(args, model, train_loader, optimizer, epoch) -> None:
    model.train()
    for batch, (images, labels) in enumerate(train_loader, start=1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch + 1} batch {batch}/{len(train_loader)} loss {loss.item():.4f}")


def test(model, test_loader, epoch) -> None:
    model.eval()
    loss_sum, num_correct, num_images = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in test_loader:
            output = model(images)
            loss_sum += functional.cross_entropy(output, labels, reduction="sum").item()
            num_correct += (output.argmax(1) == labels).sum().item()
            num_images += len(labels)
    test_loss, accuracy = loss_sum / num_images, num_correct / num_images
    print(f"epoch {epoch + 1} test loss {test_loss:.4f} accuracy {accuracy:.4f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--gamma", type=float, default=0.9, help="the learning rate's decay")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10, help="in batches")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)

    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=NUM_TEST_IMAGES)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = ExponentialLR(optimizer, gamma=args.gamma)

    for epoch in range(args.epochs):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()

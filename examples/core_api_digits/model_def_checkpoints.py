"""Step 3: the same training, which can also be paused, moved, killed and continued."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

# Import Paceline.
import paceline

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


# Pass core_context into train() and test().
def train(core_context, args, model, train_loader, optimizer, epoch) -> None:
    model.train()
    for batch, (images, labels) in enumerate(train_loader, start=1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            print(f"epoch {epoch + 1} batch {batch}/{len(train_loader)} loss {loss.item():.4f}")

            # Report training metrics. steps_completed counts the batches of all epochs, so
            # that it never stands for two different moments.
            core_context.train.report_training_metrics(
                steps_completed=epoch * len(train_loader) + batch,
                metrics={"train_loss": loss.item(), "epochs": epoch + batch / len(train_loader)},
            )


# test() also takes steps_completed, the place of its result on the same axis.
def test(core_context, model, test_loader, epoch, steps_completed) -> None:
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

    # Report validation metrics.
    core_context.train.report_validation_metrics(
        steps_completed=steps_completed,
        metrics={"test_loss": test_loss, "accuracy": accuracy, "epochs": epoch + 1},
    )


# NEW: Store all that the training needs to go on as if nothing had happened.
def store_state(core_context, model, optimizer, scheduler, epochs_completed, steps_completed):
    info = paceline.get_cluster_info()
    state = {
        "trial_id": info.trial.trial_id if info else None,
        "epochs_completed": epochs_completed,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    with core_context.checkpoint.store_path({"steps_completed": steps_completed}) as (path, _):
        torch.save(state, path / "state.pt")


# NEW: Load what store_state() stored, and return the number of epochs completed.
def load_state(core_context, uuid, model, optimizer, scheduler) -> int:
    with core_context.checkpoint.restore_path(uuid) as path:
        state = torch.load(path / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])

    # A new trial that continues an older one starts with its weights and counts from zero. The
    # same trial goes on where it was, after a pause, a restart or a preemption.
    info = paceline.get_cluster_info()
    if state["trial_id"] != (info.trial.trial_id if info else None):
        return 0
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    return state["epochs_completed"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--gamma", type=float, default=0.9, help="the learning rate's decay")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10, help="in batches")
    return parser.parse_args()


# Take core_context.
def main(core_context) -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)

    train_set, test_set = load_data()
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=NUM_TEST_IMAGES)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = ExponentialLR(optimizer, gamma=args.gamma)

    # NEW: Continue from the latest checkpoint if there is one.
    epochs_completed = 0
    if core_context.latest_checkpoint is not None:
        epochs_completed = load_state(
            core_context, core_context.latest_checkpoint, model, optimizer, scheduler
        )

    # NEW: Start after the epochs that are done.
    for epoch in range(epochs_completed, args.epochs):
        train(core_context, args, model, train_loader, optimizer, epoch)
        # Say after how many batches the test is made.
        steps_completed = (epoch + 1) * len(train_loader)
        test(core_context, model, test_loader, epoch, steps_completed)
        scheduler.step()

        # NEW: Store a checkpoint after every epoch.
        store_state(core_context, model, optimizer, scheduler, epoch + 1, steps_completed)

        # NEW: Leave when the experiment was paused or the machine is needed; the checkpoint
        # above is where the next attempt starts.
        if core_context.preempt.should_preempt():
            print(f"preempted after epoch {epoch + 1}")
            return


if __name__ == "__main__":
    # Create a context. Under a master it reports there, else into ./paceline_runs.
    with paceline.core.init() as core_context:
        main(core_context)

"""Step 5: the training of step 3, shared by several processes."""

import argparse
import os

import torch

# NEW: Import torch's distributed parts.
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

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


# NEW: Add a tensor up over all processes; alone there is nothing to add.
def sum_over_ranks(core_context, value: Tensor) -> Tensor:
    if core_context.distributed.size > 1:
        dist.all_reduce(value)
    return value


# Pass core_context into train() and test().
def train(core_context, args, model, train_loader, optimizer, epoch) -> None:
    model.train()
    for batch, (images, labels) in enumerate(train_loader, start=1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if batch % args.log_interval == 0:
            # NEW: Each process has a part of the batch: average, then let the chief report.
            loss = sum_over_ranks(core_context, loss.detach()) / core_context.distributed.size
            if core_context.distributed.rank != 0:
                continue
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
    # NEW: Each process saw its own images: add the sums and the counts up before dividing.
    sums = torch.tensor([loss_sum, num_correct, num_images], dtype=torch.float64)
    loss_sum, num_correct, num_images = sum_over_ranks(core_context, sums).tolist()
    test_loss, accuracy = loss_sum / num_images, num_correct / num_images
    # NEW: Only the chief prints and reports.
    if core_context.distributed.rank != 0:
        return
    print(f"epoch {epoch + 1} test loss {test_loss:.4f} accuracy {accuracy:.4f}")

    # Report validation metrics.
    core_context.train.report_validation_metrics(
        steps_completed=steps_completed,
        metrics={"test_loss": test_loss, "accuracy": accuracy, "epochs": epoch + 1},
    )


# Store all that the training needs to go on as if nothing had happened.
def store_state(core_context, model, optimizer, scheduler, epochs_completed, steps_completed):
    # NEW: The models are the same everywhere, the random numbers are not: gather those.
    rngs = core_context.distributed.gather(torch.get_rng_state())
    # NEW: Only the chief stores.
    if core_context.distributed.rank != 0:
        return
    info = paceline.get_cluster_info()
    state = {
        "trial_id": info.trial.trial_id if info else None,
        "epochs_completed": epochs_completed,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        # NEW: One state per process.
        "rngs": rngs,
    }
    with core_context.checkpoint.store_path({"steps_completed": steps_completed}) as (path, _):
        torch.save(state, path / "state.pt")


# Load what store_state() stored, and return the number of epochs completed.
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
    # NEW: Each process gets its own random numbers back; another number of processes draws anew.
    if len(state["rngs"]) == core_context.distributed.size:
        torch.set_rng_state(state["rngs"][core_context.distributed.rank])
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

    # NEW: Give each process its part of the data, and of each batch. The sampler repeats an image
    # if the training set cannot be divided; the test set is divided without repeats.
    rank, size = core_context.distributed.rank, core_context.distributed.size
    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set, num_replicas=size, rank=rank, seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // size, sampler=sampler)
    test_set = Subset(test_set, range(rank, len(test_set), size))
    test_loader = DataLoader(test_set, batch_size=NUM_TEST_IMAGES)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = ExponentialLR(optimizer, gamma=args.gamma)

    # Continue from the latest checkpoint if there is one.
    epochs_completed = 0
    if core_context.latest_checkpoint is not None:
        epochs_completed = load_state(
            core_context, core_context.latest_checkpoint, model, optimizer, scheduler
        )

    # NEW: From now on gradients are averaged over the processes, and each drops out other units.
    ddp_model = DistributedDataParallel(model) if size > 1 else model
    if epochs_completed == 0:
        torch.manual_seed(args.seed + rank)

    # Start after the epochs that are done.
    for epoch in range(epochs_completed, args.epochs):
        # NEW: Shuffle anew in each epoch, in the same way everywhere.
        sampler.set_epoch(epoch)
        train(core_context, args, ddp_model, train_loader, optimizer, epoch)
        # Say after how many batches the test is made.
        steps_completed = (epoch + 1) * len(train_loader)
        test(core_context, model, test_loader, epoch, steps_completed)
        scheduler.step()

        # Store a checkpoint after every epoch.
        store_state(core_context, model, optimizer, scheduler, epoch + 1, steps_completed)

        # Leave when the experiment was paused or the machine is needed; the checkpoint
        # above is where the next attempt starts.
        # NEW: All processes get the same answer.
        if core_context.preempt.should_preempt():
            if rank == 0:
                print(f"preempted after epoch {epoch + 1}")
            return


if __name__ == "__main__":
    # NEW: Join the other processes, if a launcher started some.
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    # NEW: Tell Paceline about them.
    distributed = paceline.core.DistributedContext.from_torch_distributed()
    # Create a context. Under a master it reports there, else into ./paceline_runs.
    with paceline.core.init(distributed=distributed) as core_context:
        main(core_context)
    if dist.is_initialized():
        dist.destroy_process_group()

"""A model of characters: from the last three, it predicts the next."""

import torch

import paceline

TEXT = "the night is long, the model is small, and the loss goes down while people sleep. " * 20
LETTERS = sorted(set(TEXT))
HISTORY = 3


def main() -> None:
    with paceline.core.init() as context:
        trial = context.info.trial
        torch.manual_seed(trial.trial_seed)
        lr, width = trial.hparams["lr"], trial.hparams["width"]
        model = torch.nn.Sequential(
            torch.nn.Embedding(len(LETTERS), width),
            torch.nn.Flatten(),
            torch.nn.Linear(HISTORY * width, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, len(LETTERS)),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        first = 0
        if context.latest_checkpoint is not None:
            with context.checkpoint.restore_path(context.latest_checkpoint) as path:
                state = torch.load(path / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first = state["step"]
        data = torch.tensor([LETTERS.index(letter) for letter in TEXT])
        rows = data.unfold(0, HISTORY + 1, 1)
        train, held_out = rows[: len(rows) * 4 // 5], rows[len(rows) * 4 // 5 :]
        for step in range(first + 1, trial.hparams["steps"] + 1):
            # The batch depends on the seed and the step alone, so a resumed training has the same.
            order = torch.Generator().manual_seed(trial.trial_seed * 100_003 + step)
            batch = train[torch.randint(len(train), (32,), generator=order)]
            loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 and not context.preempt.should_preempt():
                continue
            with torch.no_grad():
                value = torch.nn.functional.cross_entropy(model(held_out[:, :-1]), held_out[:, -1])
            context.train.report_training_metrics(step, {"loss": loss.item()})
            context.train.report_validation_metrics(step, {"loss": value.item()})
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                torch.save(state, path / "state.pt")
            if context.preempt.should_preempt():
                return


if __name__ == "__main__":
    main()

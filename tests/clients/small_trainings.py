"""Two small trainings whose libraries log by themselves, as the beginning of a script."""

LIBRARIES = """
        import lightning, torch, transformers
        from torch.utils.data import DataLoader, TensorDataset

        def fit_transformers(report_to, **options):
            config = transformers.BertConfig(
                vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                intermediate_size=8, max_position_embeddings=16)
            data = [{"input_ids": torch.tensor([n, 1, 2, 3]), "labels": torch.tensor(n % 2)}
                    for n in range(16)]
            arguments = transformers.TrainingArguments(
                "out", report_to=report_to, max_steps=4, logging_steps=1, save_strategy="no",
                per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, **options)
            model = transformers.BertForSequenceClassification(config)
            transformers.Trainer(model, arguments, train_dataset=data).train()

        class Line(lightning.LightningModule):
            def __init__(self, lr=0.1):
                super().__init__()
                self.save_hyperparameters()
                self.line = torch.nn.Linear(1, 1)

            def training_step(self, batch, _):
                loss = ((self.line(batch[0]) - batch[1]) ** 2).mean()
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

        def fit_lightning(logger):
            x = torch.rand(16, 1)
            lightning.Trainer(
                max_epochs=2, logger=logger, log_every_n_steps=1, accelerator="cpu",
                enable_progress_bar=False, enable_model_summary=False,
            ).fit(Line(), DataLoader(TensorDataset(x, 3 * x), 4))
"""

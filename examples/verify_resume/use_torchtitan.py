"""torchtitan's Trainer on a small Llama 3, resumed by its own checkpoints."""

import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29533")

from torchtitan.tools import utils  # noqa: E402

if not torch.cuda.is_available():
    # torchtitan asks for an accelerator; torch.cpu lacks only what tells its memory.
    cpu = utils.device_module = torch.cpu
    utils.device_type = "cpu"
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: type("Properties", (), {"total_memory": 1 << 34})
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.config import DebugConfig  # noqa: E402
from torchtitan.hf_datasets import text_datasets  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402

words = {f"w{number}": number for number in range(2000)} | {"<unk>": 2000, "<eos>": 2001}
os.makedirs("tokenizer", exist_ok=True)
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save("tokenizer/tokenizer.json")
texts = [" ".join(f"w{(7 * row + 3 * place) % 2000}" for place in range(50)) for row in range(500)]
text_datasets.DATASETS["digits"] = text_datasets.DatasetConfig(
    path="",
    loader=lambda _: Dataset.from_dict({"text": texts}),
    sample_processor=lambda sample: sample["text"],
)
config = config_registry.llama3_debugmodel()
config.model_spec = model_registry("debugmodel", attn_backend="flex")
config.hf_assets_path = "tokenizer"
config.dataloader.dataset = "digits"
config.training.steps, config.training.seq_len, config.training.local_batch_size = 24, 64, 4
config.lr_scheduler.warmup_steps = 2
config.checkpoint = CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False)
config.checkpoint.keep_latest_k = 0
config.validator.enable = False
config.debug = DebugConfig(seed=0, deterministic=True)
trainer = config.build()
trainer.train()
trainer.close()

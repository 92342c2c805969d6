"""Examples and exit codes at the end of each help."""

EXAMPLES: dict[str, tuple[str, str]] = {
    "up": ("up --detach", "up --port 0 --slots 2 --runs paceline_runs"),
    "down": ("down", "down --keep-trials"),
    "status": ("status", "status --json"),
    "backup": ("backup /backups/paceline", "backup /backups/paceline --follow --keep 3"),
    "restore": ("restore /backups/paceline", "restore /backups/paceline --keep-tokens all"),
    "login": ("login", "login --json"),
    "sync": ("sync my-run", "sync paceline_runs/my-run --watch"),
    "preview-search": (
        "preview-search config.yaml",
        "preview-search config.yaml --config searcher.max_trials=16 --json",
    ),
    "verify-resume": ("verify-resume train.py", "verify-resume --json train.py -- --epochs 2"),
    "version": ("version", "version --json"),
    "experiment create": (
        "e create config.yaml -f",
        "e create config.yaml code --config hyperparameters.lr=0.1 --key try-7 --json",
    ),
    "experiment archive": ("e archive 3", "e archive 3 --json"),
    "experiment unarchive": ("e unarchive 3", "e unarchive 3 --json"),
    "experiment delete": ("e delete 3 --dry-run", "e delete 3 --yes"),
    "experiment fork": ("e fork 3 --config hyperparameters.lr=0.2 -f", "e fork 3 --dry-run"),
    "experiment download": ("e download 3", "e download 3 ./copy"),
    "experiment set-max-slots": ("e set-max-slots 3 4", "e set-max-slots 3 none"),
    "experiment set-priority": ("e set-priority 3 1", "e set-priority 3 99 --json"),
    "experiment set-weight": ("e set-weight 3 2.5", "e set-weight 3 1 --json"),
    "experiment list": ("e list --state running", "e list --limit 100 --format tsv"),
    "experiment describe": ("e describe 3", "e describe 3 --json"),
    "experiment logs": ("e logs 3 -f", "e logs 3 --tail 50 --json"),
    "experiment pause": ("e pause 3", "e pause 3 --json"),
    "experiment activate": ("e activate 3", "e activate 3 --json"),
    "experiment cancel": ("e cancel 3", "e cancel 3 --json"),
    "experiment kill": ("e kill 3", "e kill 3 --json"),
    "experiment wait": ("e wait 3", "e wait 3 --timeout 600 --json"),
    "experiment continue": ("e continue 3 -f", "e continue 3 --config searcher.max_length=200"),
    "experiment list-trials": ("e list-trials 3 --best", "e lt 3 --format tsv"),
    "experiment list-checkpoints": ("e list-checkpoints 3 --best", "e lc 3 --json"),
    "trial describe": ("t describe 5", "t describe 5 --environment"),
    "trial metrics": ("t metrics 5 -g validation", "t metrics 5 --json"),
    "trial time": ("t time 5", "t time 5 --json"),
    "trial logs": ("t logs 5 -f", "t logs 5 --level WARNING --tail 20"),
    "trial kill": ("t kill 5", "t kill 5 --json"),
    "trial continue": (
        "t continue 5 -f",
        "t continue 5 --config searcher.max_length=200 --key longer",
    ),
    "trial download": ("t download 5", "t download 5 --latest -o weights"),
    "checkpoint export": (
        "c export latest weights.safetensors --run last",
        "c export 0f3c2a model --max-shard-size 5GB",
    ),
    "checkpoint list": ("c list 3 --best", "c list 3 --format tsv"),
    "checkpoint describe": ("c describe UUID", "c describe UUID --json"),
    "checkpoint download": ("c download UUID", "c download s3://bucket/runs/UUID -o model"),
    "checkpoint delete": ("c delete UUID --yes", "c delete UUID --glob 'optimizer*' --yes"),
    "slot list": ("slot list", "slot list --json"),
    "slot drain": ("slot drain local 0", "slot drain node-7 3 --finish"),
    "slot resume": ("slot resume local 0", "slot resume node-7 3 --json"),
    "job list": ("job list", "job list --pool default --json"),
    "job move": ("job move 3 --front", "job move 3 --behind 5"),
    "runner": (
        "runner --master https://head:8080 --token-file token",
        "runner --master head:8080 --token-file token --slots 2 --idle-timeout 600",
    ),
    "runner list": ("runner list", "runner list --json"),
    "runner drain": ("runner drain node-7", "runner drain node-7 --finish"),
    "runner resume": ("runner resume node-7", "runner resume node-7 --json"),
    "runner forget": ("runner forget node-7", "runner forget node-7 --json"),
    "pool list": ("pool list", "pool list --json"),
    "pool set": ("pool set default --policy priority", "pool set big --max-slots 8 --labels gpu=h"),
    "pool reset": ("pool reset default", "pool reset big --json"),
    "runs list": ("runs list", "runs list paceline_runs --json"),
    "runs show": ("runs show last", "runs show my-run --group validation --json"),
    "runs time": ("runs time last", "runs time last --json"),
    "token create": ("token create ci --scope submit", "token create box --scope runner --json"),
    "token list": ("token list", "token list --format tsv"),
    "token revoke": ("token revoke ci", "token revoke 2 --json"),
    "token renew-home": ("token renew-home", "token renew-home --json"),
    "user set-password": ("user set-password", "user set-password --user admin"),
    "examples list": ("examples list", "examples list --json"),
    "examples copy": ("examples copy core_api_digits", "examples copy core_api_digits ./digits"),
    "home check": ("home check", "home check --fix --json"),
}
_FOLLOWED = {
    0: "COMPLETED",
    1: "another end, or an error",
    2: "wrong usage",
    3: "COMPLETED, but records are lost",
    4: "no finite value of the searched metric",
    130: "interrupted",
}
_EXIT_CODES: dict[str, dict[int, str]] = {
    "experiment wait": _FOLLOWED | {124: "not ended within --timeout"},
    "verify-resume": {1: "the runs differ", 2: "no verdict, or wrong usage"},
    "restore": {3: "restored, but files of the backup are damaged"},
    "home check": {1: "differences are left, or an error"},
}
_COMMON = {0: "success", 1: "an error", 2: "wrong usage", 130: "interrupted"}
# With `-f` these commands end as the experiment does.
_CAN_FOLLOW = {"experiment create", "experiment continue", "experiment fork", "experiment logs",
               "trial continue"}  # fmt: skip
_SHORT = {"e": "experiment", "t": "trial", "c": "checkpoint", "s": "slot"}
_SHORT_COMMANDS = {"lt": "list-trials", "lc": "list-checkpoints"}


def help_ending(command_path: str) -> str:
    """Return two examples and the exit codes of a command or a group, as lines for its help."""
    _, *words = command_path.split()
    words = [_SHORT.get(word, word) for word in words[:1]] + [
        _SHORT_COMMANDS.get(word, word) for word in words[1:]
    ]
    path = " ".join(words)
    # A group shows examples of its first two commands.
    below = [one[0] for name, one in EXAMPLES.items() if f"{name} ".startswith(f"{path} ".lstrip())]
    examples = EXAMPLES.get(path) or below[:2]
    lines = ["", "Examples:", *(f"  paceline {example}" for example in examples), ""]
    codes = _COMMON | _EXIT_CODES.get(path, {})
    for title, group in (("Exit codes", codes), ("With -f", _FOLLOWED)):
        if group is codes or path in _CAN_FOLLOW:
            lines += [f"{title}:", *(f"  {code:<4} {group[code]}" for code in sorted(group))]
    return "\n".join(lines) + "\n"

"""The commands and their configuration; nothing here imports torch before a configuration is valid."""

#: Commands whose configuration Hydra composes; each has a module here with `run(*, ...)` and a YAML file in configs/.
CONFIGURED = ("train", "sample", "transcribe", "evaluate", "verify", "demo", "export", "push", "shards", "corpus")
#: Those that need a checkpoint.
OF_CHECKPOINTS = ("sample", "transcribe", "evaluate", "demo", "export", "push")
#: Commands that take a few words; each has a module here with `main(words) -> exit code`.
PLAIN = ("info", "doctor", "completion")
FLAGS = {"-m": "multirun", "--multirun": "multirun", "--keys": "keys", "--resolve": "resolve"}
VALUED = {"-c": "cfg", "--cfg": "cfg", "-cd": "config_dir", "--config-dir": "config_dir"}

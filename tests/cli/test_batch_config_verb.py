"""`reshard batch-config` on files as people have them: the bytes that change are the numbers, and nothing else does."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from reshard.batch.refit import refit
from reshard.cli import batch_config
from reshard.cli.main import main

CONFIGS = Path(__file__).parents[2] / "scripts" / "configs"


def run(path: Path, *argv: str) -> int:
    return main(["batch-config", str(path), *argv])


@dataclass(frozen=True)
class Case:
    """A file with `«old|new»` where a number is to change, and the options that change it."""

    name: str
    marked: str
    options: str
    encode: Any = field(default=lambda text: text.encode())

    def side(self, at: int) -> str:
        text = self.marked
        while "«" in text:
            head, rest = text.split("«", 1)
            inner, tail = rest.split("»", 1)
            text = head + inner.split("|")[at] + tail
        return text

    def load(self, data: bytes) -> Any:
        text = data.decode("utf-8-sig")
        return json.loads(text) if text.startswith("{") else list(yaml.safe_load_all(text))


ACCELERATE_FSDP = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
gradient_accumulation_steps: «4|8»
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: «8|4»
rdzv_backend: static
use_cpu: false
"""

TRAINING_ARGUMENTS = """\
# Fine-tuning, as on the 8-GPU node.  8 x 2 x 4 = 64
output_dir: out/möbel-日本語-🙂    # before the numbers: characters of two, three and four bytes
learning_rate: 2.0e-05

per_device_train_batch_size:   4      # what fits
per_device_eval_batch_size: 8
gradient_accumulation_steps:  «2|4»   # per_device_train_batch_size: 4
bf16: true
fsdp: "full_shard auto_wrap"
fsdp_config: {transformer_layer_cls_to_wrap: [LlamaDecoderLayer], gradient_accumulation_steps: 2}
"""

DEEPSPEED = """\
{
\t"train_batch_size": 256,
\t"train_micro_batch_size_per_gpu": «8|8»,
\t"gradient_accumulation_steps" :«4|8» ,
\t"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e6,
\t\t"note": "train_batch_size\\": 8, \\u00e9"},
\t"bf16": {"enabled": true},
\t"steps_per_print": 1e2
}
"""

CASES = [
    Case("accelerate.yaml", ACCELERATE_FSDP, "--world-size 4"),
    Case(
        "accelerate_deepspeed.yaml",
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  gradient_accumulation_steps: «2|1»\n  zero_stage: 3\n"
        "distributed_type: DEEPSPEED\nnum_machines: 2\nnum_processes: «8|16»\n",
        "--world-size 16 --old-world-size 8",
    ),
    Case("args.yaml", TRAINING_ARGUMENTS, "--world-size 4 --old-world-size 8"),
    Case("args_grow.yaml", TRAINING_ARGUMENTS.replace("   4 ", "   «4|2» ").replace("«2|4»", "«2|1»"),
         "--world-size 32 --old-world-size 8"),
    Case("args.json", '{"output_dir": "é", "per_device_train_batch_size": 16, "gradient_accumulation_steps": «1|2»}',
         "--world-size 2 --old-world-size 4"),
    Case("args_consent.yaml", TRAINING_ARGUMENTS.replace("   4 ", "   «4|2» ").replace("«2|4»", "«2|5»"),
         "--world-size 6 --old-world-size 8 --global-batch 60"),
    Case("ds.json", DEEPSPEED, "--world-size 4"),
    Case("ds_known.json", DEEPSPEED.replace("256", "«256|252»").replace("«8|8»", "«8|7»").replace("«4|8»", "«4|6»"),
         "--world-size 6 --old-world-size 8 --global-batch 252"),
    Case("ds_bom.json", DEEPSPEED, "--world-size 4", encode=lambda text: b"\xef\xbb\xbf" + text.encode()),
    Case("ds_derived.json", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": «8|4»}', "--world-size 16"),
    Case("ds_auto_global.json",
         '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2,"gradient_accumulation_steps": "«3|6»"}',
         "--world-size 4 --old-world-size 8"),
    Case("ds_no_micro.json",
         '{"train_batch_size": 64, "gradient_accumulation_steps": «2|4», "zero_optimization": {"stage": 2}}',
         "--world-size 4 --old-world-size 8"),
    Case("no_suffix", '{"per_device_train_batch_size": 16,\n\t"gradient_accumulation_steps": «1|2»}',
         "--world-size 2 --old-world-size 4"),
    Case("crlf.yaml", TRAINING_ARGUMENTS, "--world-size 4 --old-world-size 8",
         encode=lambda text: text.replace("\n", "\r\n").encode()),
    Case("bom.yaml", TRAINING_ARGUMENTS, "--world-size 4 --old-world-size 8",
         encode=lambda text: b"\xef\xbb\xbf" + text.encode()),
    Case("flow.yaml", "args: {a: [1, {b: 2}], 'per_device_train_batch_size': \"«4|2»\", gradient_accumulation_steps: "
         "«0x2|1»,}  # 4\n", "--world-size 32 --old-world-size 8"),
    Case("typed.yaml", "per_device_train_batch_size: &own !!int '«4|2»'\ngradient_accumulation_steps: !!int «2|1» # x\n"
         "max_steps: 1_000\n",
         "--world-size 32 --old-world-size 8"),
    Case("underscored.yaml", "per_device_train_batch_size: «1_024|512»\ngradient_accumulation_steps: 1\n",
         "--world-size 8 --old-world-size 4"),
    Case("documents.yaml", "# first\nname: x\n---\nper_device_train_batch_size: 4\ngradient_accumulation_steps: «2|4»\n"
         "...\n---\nper_device_eval_batch_size: 4\n", "--world-size 4 --old-world-size 8"),
    Case("merged.yaml", "defaults: &defaults\n  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2\n"
         "train:\n  <<: *defaults\n  gradient_accumulation_steps: «2|4»\n", "--world-size 4 --old-world-size 8"),
    Case("inline_deepspeed.yaml", "per_device_train_batch_size: 4\ngradient_accumulation_steps: «2|4»\ndeepspeed:\n"
         "  train_micro_batch_size_per_gpu: auto\n  train_batch_size: auto\n  gradient_accumulation_steps: auto\n",
         "--world-size 4 --old-world-size 8"),
    Case("axolotl.yml", "base_model: NousResearch/Llama-3.2-1B\ndatasets:\n  - path: teknium/GPT4-LLM-Cleaned\n"
         "    type: alpaca\nval_set_size: 0.1\nmicro_batch_size: 2 # small\ngradient_accumulation_steps: «2|4»\n"
         "gradient_checkpointing: true\nspecial_tokens:\n  pad_token: <|end_of_text|>\n",
         "--world-size 4 --old-world-size 8 --keys micro=micro_batch_size,accumulation=gradient_accumulation_steps"),
    Case("torchtune.yaml", "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\ntokenizer:\n"
         "  path: ${output_dir}/tokenizer.model\nbatch_size: «2|1»\nepochs: 1\n"
         "gradient_accumulation_steps: «8|1»  # 16\n"
         "optimizer:\n  lr: 2e-5\nlog: [{every: 1}]\n",
         "--world-size 32 --old-world-size 2 --keys accumulation=gradient_accumulation_steps,micro=batch_size"),
    Case("torchtitan.json", '{"stages": [{}, {"training.local": «8|4», "n": [[«64|68»]]}]}',
         r"--world-size 17 --keys micro=stages[1].training\.local,global=stages.1.n[0].0 --global-batch 68"),
    Case("ours.yaml", "batch: {global_batch: 64, micro_batch: «4|2»}\n", "--world-size 32"),
    Case("ours_consent.yaml", "batch:\n  global_batch: «64|72» # windows\n  micro_batch: 4\n",
         "--world-size 6 --global-batch 72"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_the_numbers_change(tmp_path: Path, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / case.name
    before, after = case.encode(case.side(0)), case.encode(case.side(1))
    path.write_bytes(before)
    options = case.options.split()

    assert run(path, *options, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert path.read_bytes() == before
    assert not planned["written"]

    assert run(path, *options, "--write", "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert path.read_bytes() == after
    assert written == {**planned, "written": True}
    assert [item.name for item in tmp_path.iterdir()] == [case.name]

    leaves_before, leaves_after = leaves(case.load(before)), leaves(case.load(after))
    changed = {key: value for key, value in leaves_after.items() if leaves_before[key] != value}
    assert leaves_before.keys() == leaves_after.keys()
    assert sorted(int(value) for value in changed.values()) == sorted(change["new"] for change in planned["changes"])
    new = planned["new"]
    if planned["framework"] != "reshard's training script":
        assert new["micro_batch"] * new["accumulation"] * new["world_size"] == new["global_batch"]
        if "--global-batch" not in options:
            assert new["global_batch"] == planned["old"]["global_batch"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    if isinstance(value, dict):
        return {key: leaf for name, item in value.items() for key, leaf in leaves(item, (*path, name)).items()}
    if isinstance(value, list):
        return {key: leaf for at, item in enumerate(value) for key, leaf in leaves(item, (*path, at)).items()}
    return {path: value}


@pytest.mark.parametrize("name", ["tiny", "small", "gpu8"])
@pytest.mark.parametrize("ranks", ["1", "3", "8"])
def test_our_own_configs_need_no_change(
    tmp_path: Path, name: str, ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes((CONFIGS / f"{name}.yaml").read_bytes())
    assert run(path, "--world-size", ranks, "--write") == 0
    out, err = capsys.readouterr()
    assert "nothing to change: what is not written follows" in out
    assert "nothing to change" in err
    assert path.read_bytes() == (CONFIGS / f"{name}.yaml").read_bytes()


def test_b63_the_text_has_both_sums_the_lines_and_the_assumption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n")
    assert run(path, "--world-size", "4", "--old-world-size", "8") == 0
    out, err = capsys.readouterr()
    assert "old: micro-batch 4 x accumulation 2 x 8 ranks = global batch 64" in out
    assert "new: micro-batch 4 x accumulation 4 x 4 ranks = global batch 64" in out
    assert "line 2: gradient_accumulation_steps: 2 -> 4" in out
    assert "mean over the whole global batch" in out
    assert err == ""


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulation"), [(4, 4, 4), (16, 4, 1), (1, 4, 16), (32, 2, 1), (64, 1, 1), (2, 4, 8)]
)
def test_b63_the_global_batch_is_kept(
    tmp_path: Path, ranks: int, micro: int, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n")
    assert run(path, "--world-size", str(ranks), "--old-world-size", "8", "--write") == 0
    assert yaml.safe_load(path.read_text()) == {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
    }
    assert f"it is for {ranks} ranks now" in capsys.readouterr().err


def test_accelerate_says_where_the_old_world_size_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(Case("", ACCELERATE_FSDP, "").side(0))
    assert run(path, "--world-size", "16") == 0
    out = capsys.readouterr().out
    assert "old: accumulation 4 x 8 ranks = global batch 32 micro-batches" in out
    assert "new: accumulation 2 x 16 ranks = global batch 32 micro-batches" in out
    assert "line 14: num_processes 8 is the old world size" in out
    assert "the micro-batch is not in this file" in out


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_mode_and_link_stay(tmp_path: Path, mode: int) -> None:
    (tmp_path / "real").mkdir()
    path, link = tmp_path / "real" / "data", tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n")
    path.chmod(mode)
    link.symlink_to("real/data")
    assert run(link, "--world-size", "4", "--old-world-size", "8", "--write") == 0
    assert link.is_symlink()
    assert path.stat().st_mode & 0o7777 == mode
    assert yaml.safe_load(path.read_text())["gradient_accumulation_steps"] == 4


def test_a_file_that_changes_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(ARGS)

    def refit_slowly(*args: Any) -> Any:
        path.write_text(f"{ARGS}seed: 1\n")
        return refit(*args)

    monkeypatch.setattr(batch_config, "refit", refit_slowly)
    assert run(path, "--world-size", "4", *HERE, "--write") == 2
    assert "changed by someone else meanwhile" in capsys.readouterr().err
    assert path.read_text() == f"{ARGS}seed: 1\n"


def test_a_disk_that_refuses_leaves_the_file_and_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(ARGS)
    umask = os.umask(0o022)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: os.fstat(-1))
            assert run(path, "--world-size", "4", *HERE, "--write") == 2
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)
    assert "cannot write" in capsys.readouterr().err
    assert path.read_text() == ARGS
    assert list(tmp_path.iterdir()) == [path]


def test_a_protected_file_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n")
    path.chmod(0o444)
    assert run(path, "--world-size", "4", "--old-world-size", "8", "--write") == 2
    assert "write-protected" in capsys.readouterr().err
    assert "steps: 2" in path.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
def test_a_file_of_somebody_else_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever may write in a folder can replace any file there; that is no leave to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "args.yaml"
        path.write_text(ARGS)
        path.chmod(0o644)
        Path(folder).chmod(0o777)
        os.seteuid(65534)
        try:
            status = run(path, "--world-size", "4", "--old-world-size", "8", "--write")
        finally:
            os.seteuid(0)
        assert status == 2
        assert "write-protected" in capsys.readouterr().err
        assert (path.read_text(), path.stat().st_uid) == (ARGS, 0)


def test_accelerate_names_the_file_and_the_sizes_that_have_to_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accelerate.yaml"
    head = "distributed_type: DEEPSPEED\nnum_processes: 8\n"
    path.write_text(f"{head}deepspeed_config:\n  zero3_init_flag: true\n  deepspeed_config_file: ds.json\n")
    assert run(path, "--world-size", "4") == 2
    assert "run this on the file that line 5 names" in capsys.readouterr().err
    sizes = "parallelism_config:\n  parallelism_config_dp_replicate_size: 1\n  parallelism_config_dp_shard_size: 8\n"
    path.write_text(f"{head}gradient_accumulation_steps: 2\n{sizes}")
    assert run(path, "--world-size", "4") == 0
    out = capsys.readouterr().out
    assert "line 6: parallelism_config_dp_shard_size stays as it is, and num_processes has to be a multiple" in out
    assert "dp_replicate" not in out


ARGS = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
HERE = ["--old-world-size", "8"]
ZERO = '{"train_batch_size": %s, "train_micro_batch_size_per_gpu": %s, "gradient_accumulation_steps": %s}'

FAULTS = {
    "no old world size": (ARGS, [], ["--old-world-size", "the global batch is not in the file"]),
    "uneven": (ARGS, [*HERE, "--world-size", "6"],
               ["64 samples does not split evenly over 6 ranks", "world sizes that keep it: 4 or 8",
                "--global-batch 48 (4 x 2 x 6), 60 (2 x 5 x 6), 66 (1 x 11 x 6), 72 (4 x 3 x 6)"]),
    "uneven, consent": (ARGS, [*HERE, "--world-size", "6", "--global-batch", "62"], ["62 samples does not split"]),
    "uneven, accelerate": (Case("", ACCELERATE_FSDP, "").side(0), ["--world-size", "6"],
                           ["32 micro-batches does not split evenly over 6 ranks", "4 or 8"]),
    "accelerate, consent": (Case("", ACCELERATE_FSDP, "").side(0), ["--global-batch", "64"],
                            ["--global-batch: the file does not say"]),
    "accelerate, another": (Case("", ACCELERATE_FSDP, "").side(0), ["--old-world-size", "6"],
                            ["--old-world-size", "expected 8, found 6"]),
    "accelerate, nothing": ("distributed_type: FSDP\nnum_processes: 8\n", [], ["says nothing of the batch"]),
    "accelerate, auto": ("distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n"
                         "  gradient_accumulation_steps: auto\n", [], ["line 4", "auto", "TrainingArguments"]),
    "accelerate, tensor parallel": ("distributed_type: FSDP\nnum_processes: 8\ngradient_accumulation_steps: 2\n"
                                    "parallelism_config:\n  parallelism_config_tp_size: 2\n", [],
                                    ["line 5", "num_processes counts the GPUs of model parallelism"]),
    "contradiction": (ZERO % (256, 8, 4), ["--old-world-size", "6"],
                      ["micro-batch 8 x accumulation 4 x ranks 6 = 192", "a global batch of 256"]),
    "contradiction without ranks": (ZERO % (250, 8, 4), [],
                                    ["micro-batch 8 x accumulation 4 = 32, or a multiple", "a global batch of 250"]),
    "all auto": (ZERO % ('"auto"', '"auto"', '"auto"'), HERE, ["auto, to be filled in", "TrainingArguments"]),
    "micro auto": (ZERO % (64, '"auto"', 2), HERE, ["train_micro_batch_size_per_gpu: line 1", "auto"]),
    "micro auto, ours": ("batch: {global_batch: auto, micro_batch: 4}", [], ["batch.global_batch: cannot be auto"]),
    "alias": ("x:\n  y: &bs 4\nper_device_train_batch_size: 4\ngradient_accumulation_steps: *bs\n", HERE,
              ["gradient_accumulation_steps: line 2: 4 has to become 8", "what is at line 2 stands in other places"]),
    "anchor": ("per_device_train_batch_size: 4\ngradient_accumulation_steps: &n 2\nother: *n\n", HERE,
               ["line 2: 2 has to become 4"]),
    "merge": (f"defaults: &d\n  {ARGS.replace(chr(10), chr(10) + '  ')}\ntrain:\n  <<: *d\n", HERE,
              ["train.gradient_accumulation_steps", "what is at line 1 stands in other places"]),
    "whole alias": ("a: &a\n  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2\nb: *a\n", HERE,
                    ["line 1"]),
    "two merging": (f"defaults: &d\n  {ARGS.replace(chr(10), chr(10) + '  ')}\nsft:\n  <<: *d\ndpo:\n  <<: *d\n", HERE,
                    ["in several places: line 6", "line 8", "--keys"]),
    "duplicate": ("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\ngradient_accumulation_steps: 4\n",
                  HERE, ["gradient_accumulation_steps: written more than once, in lines 2 and 4"]),
    "duplicate in JSON": ('{"train_micro_batch_size_per_gpu": 1,\n"train_micro_batch_size_per_gpu": 2}', HERE,
                          ["in lines 1 and 2"]),
    "two documents": (f"{ARGS}---\n{ARGS}", HERE, ["in several places: line 1", "line 4"]),
    "two documents, keys": ("a: 1\n---\na: 1\n", ["--keys", "global=a"], ["several documents, lines 1 and 3"]),
    "environment": (ARGS.replace("4", "${MICRO}"), HERE, ["a whole number above zero", "found ${MICRO}"]),
    "template": (ARGS.replace("4", "{{ micro }}"), HERE, ["found {{ micro }}"]),
    "template block": ("{% if x %}\n" + ARGS, HERE, ["not YAML", "line 1", "template"]),
    "octal": (ARGS.replace("4", "010"), HERE, ["plain digits", "found 010"]),
    "sexagesimal": (ARGS.replace("4", "1:30"), HERE, ["plain digits", "found 1:30"]),
    "float": (ARGS.replace("4", "4.0"), HERE, ["found 4.0"]),
    "negative": (ARGS.replace("4", "-4"), HERE, ["found -4"]),
    "zero": (ARGS.replace("4", "0"), HERE, ["found 0"]),
    "null": (ARGS.replace("4", ""), HERE, ["found nothing"]),
    "list": (ARGS.replace("4", "[4]"), HERE, ["found [4]"]),
    "escaped": (ARGS.replace("4", r'"\x34"'), HERE, [r'found "\x34"']),
    "block": (ARGS.replace("4", "|\n  4"), HERE, ["found | 4"]),
    "long": (ARGS.replace("4", "9" * 5000), HERE, ["99..."]),
    "implied": ("per_device_train_batch_size: 4\n", HERE,
                ["gradient_accumulation_steps: not written, so it is 1, and has to become 2; add it"]),
    "unknown": ("train_batch_size: 4\ngradient_accumulation_steps: 2\n", HERE,
                ["no batch settings of a known", "--keys"]),
    "empty": ("", HERE, ["no batch settings"]),
    "no such key": ("a: {b: 1}", ["--keys", "global=a.c"], ["a.c: no such key in the file"]),
    "no such index": ("a: [1]", ["--keys", "global=a[1]"], ["a.1: no such key in the file"]),
    "one key twice": ("a: 1", ["--keys", "global=a,micro=a"], ["names one key twice"]),
    "micro alone": ("a: 1", ["--keys", "micro=a"], ["the micro-batch alone"]),
    "not YAML": ("a: [1\nb: 2\n", HERE, ["not YAML"]),
    "unprintable": ("a: \x01\n", HERE, ["not YAML", "special characters"]),
    "not JSON": ('{"a": 1, // no\n}', HERE, ["not JSON", "line 1"]),
    "deep": ("[" * 2000, HERE, ["nested too deeply"]),
    "deep JSON": ('{"a":' * 20000 + "1" + "}" * 20000, HERE, ["nested too deeply"]),
    "too large": (ARGS.replace("4", "9" * 15).replace("2", "9" * 15), ["--old-world-size", "999999999"],
                  ["at most 1,000,000,000,000, found 999,999,998,", "mistyped"]),
    "too large, given": (ARGS, [*HERE, "--global-batch", "1" + "0" * 40], ["at most 1,000,000,000,000"]),
    "too large, ours": ("batch: {global_batch: 100000000000000, micro_batch: 4}", [], ["at most 1,000,000,000,000"]),
    "too large, JSON": ('{"per_device_train_batch_size": %s}' % ("9" * 5000), HERE, ["5000 digits", "shorten"]),
    "uneven, ours": ("batch: {global_batch: 10, micro_batch: 4}", [], ["not divisible by a micro-batch of 4"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, options, said = FAULTS[name]
    path = tmp_path / ("config.json" if text.startswith('{"') else "config.yaml")
    path.write_text(text, encoding="utf-8")
    before = path.read_bytes()
    world = [] if "--world-size" in options else ["--world-size", "4"]
    assert run(path, *world, *options, "--write") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"reshard: error: {path}: ") and err.count("\n") == 1, err
    for words in said:
        assert words in err
    assert path.read_bytes() == before


def test_what_cannot_be_written_is_a_warning_in_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("per_device_train_batch_size: 4\n")
    assert run(path, "--world-size", "4", "--old-world-size", "8") == 0
    out, err = capsys.readouterr()
    assert "new: micro-batch 4 x accumulation 2 x 4 ranks = global batch 32" in out
    assert "nothing to change" not in out
    assert err.startswith("reshard: warning: ") and "has to become 2; add it to the file" in err


def test_a_large_file_a_folder_and_none_at_all_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "large.yaml").write_bytes(b"a" * 1_000_001)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    for name, said in (("large.yaml", "1000001 bytes"), (".", "no file"), ("absent.yaml", "no such file"),
                       ("latin.yaml", "not UTF-8")):  # fmt: skip
        assert run(tmp_path / name, "--world-size", "4") == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("keys", ["", "micro", "micro=", "ranks=a", "micro=a,micro=b", "micro=a,"])
def test_keys_that_name_nothing_are_refused(tmp_path: Path, keys: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "x.yaml", "--world-size", "4", "--keys", keys) == 2
    assert "argument --keys: must be micro=PATH" in capsys.readouterr().err

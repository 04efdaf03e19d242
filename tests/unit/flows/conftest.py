"""A pool in memory that writes real parts, a model folder without weights, and stages without a Prefect server."""

import json
from collections import Counter
from dataclasses import dataclass

import prefect
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.pool.errors import VersionMismatch
from flows.config import PostTrainConfig, SFTConfig
from storage.checkpoints import part_name
from storage.datasets import REFERENCE, ROLLOUT, VALUES, read, write_part
from storage.filesystem import Store
from storage.manifest import Manifest
from storage.sharded import write_file

READ_ONLY = {"annotate", "describe", "fits", "generate", "save", "saved"}
ALPHABET = "0123456789+-= \nabcdefghijklmnopqrstuvwxyz"


class Killed(BaseException):
    """The flow's process dies here."""


def target(args):
    """What an operation is about: the version that an update starts from, or the folder that is written."""
    return args.get("version", "/".join(args["out"].split("/")[1:]) if "out" in args else None)


@dataclass(frozen=True)
class FakeLease:
    token: int


class FakePool:
    """Keeps the promises of the real one: operation ids, expected versions, outcomes dropped when the weights change.

    Its model answers the prompt "a+b=" rightly with every second sample, and with all of them from version 2 on. `trained` is what
    its weights are made of: the datasets of all updates since version 0.
    """

    def __init__(self, ranks=1, role="actor"):
        self.ranks, self.role = ranks, role
        self.run, self.version, self.trained = None, None, []
        self.executed, self.requests, self.cancelled, self.released = Counter(), [], [], []
        self.misfit, self.stopped = None, 0
        self.writing, self.damaged = {}, []
        self.on_operation = lambda op, args, when: None
        self._done, self._tokens = {}, 0

    def lease(self, run, holder, wait_s):
        self._tokens += 1
        return FakeLease(self._tokens)

    def release(self, lease):
        self.released.append(lease.token)

    def cancel(self, op_id):
        self.cancelled.append(op_id)

    def call(self, op, op_id, args, lease, expect_version, timeout_s, on_progress=None):
        json.dumps(args)
        assert lease.token == self._tokens, "a stale lease was used"
        self.requests.append((op, op_id, args))
        if op_id in self._done:
            return self._done[op_id]
        if expect_version is not None and expect_version != self.version:
            raise VersionMismatch("other version", expected=expect_version, held=self.version)
        if op not in READ_ONLY:
            self._done.clear()
        self.on_operation(op, args, "before")
        if op not in ("fits", "saved"):  # asked again by every attempt
            self.executed[op, target(args)] += 1
        outcomes = [getattr(self, f"_{op}")(rank, **args) for rank in range(self.ranks)]
        if op not in READ_ONLY:
            self.version = outcomes[0]["weight_version"]
        self._done[op_id] = {"ranks": outcomes, "weight_version": self.version}
        if on_progress is not None:
            on_progress({"op": op, "ranks": [{"done": 1, "total": 2, "tokens_per_second": 10.0}]})
        self.on_operation(op, args, "after")
        return self._done[op_id]

    def stop(self):
        self.stopped += 1
        self.misfit = None

    def _fits(self, rank, spec):
        return {"different": self.misfit}

    def _describe(self, rank):
        return {"run": self.run, "weight_version": self.version}

    def _load(self, rank, run, spec):
        self.run, self.trained, self.writing = run, [], {}
        return {"weight_version": 0}

    def _restore(self, rank, run, spec, store, manifest):
        manifest = Manifest.model_validate(manifest)
        self.run, self.writing = run, {}
        if manifest.step in self.damaged:
            return {"weight_version": None, "damaged": f"step {manifest.step} has a flipped bit"}
        self.trained = json.loads(Store.open(store).read(f"{manifest.folder}/{part_name(self.role, 0)}.safetensors"))
        return {"weight_version": manifest.step}

    def _save(self, rank, store, out):
        """Writes at once; tests set the state of `writing[out]` to see what the flow makes of it."""
        data = json.dumps(self.trained).encode()
        entry = write_file(Store.open(store), out, f"{part_name(self.role, rank)}.safetensors", data)
        told = {"state": "done", "problems": [], "news": []}
        figures = {"stall_seconds": 0.1, "seconds": 0.5, "bytes": float(entry.bytes)}
        if rank == 0:
            self.writing = {out: []}  # one at a time
        self.writing[out].append({**told, "files": [entry.model_dump(mode="json")], "metrics": figures})
        return {"metrics": {"stall_seconds": 0.1}}

    def _saved(self, rank, out, wait):
        if out not in self.writing:
            return {"state": "absent", "problems": [], "news": []}
        return self.writing[out][rank]

    def _update(self, rank, datasets, version, loss, **rest):
        assert set(datasets) - {"reference", "values"} in ({"rollout", "advantage"}, {"demonstration"})
        assert ("reference" in datasets) == (loss["kl"]["coef"] > 0)
        assert ("values" in datasets) == (rest["critic"] is not None)
        if rank == 0:
            self.trained.append([version, *sorted(Manifest.model_validate(d).digest for d in datasets.values())])
        return {"weight_version": version + 1, "metrics": {"loss": 0.5, "grad_norm": 1.0}}

    def _annotate(self, rank, role, store, rollout, out, temperature, max_tokens_per_micro_batch):
        store = Store.open(store)
        schema, column, offset = {
            "reference": (REFERENCE, "reference_logprobs", -0.25),
            "critic": (VALUES, "values", 0.75),
        }[role]
        mine = read(store, Manifest.model_validate(rollout)).to_pylist()[rank :: self.ranks]
        rows = [{"sample_id": row["sample_id"], column: [x + offset for x in row["rollout_logprobs"]]} for row in mine]
        entry = write_part(store, out, rank, pa.Table.from_pylist(rows, schema=schema), schema)
        return {"files": [entry.model_dump(mode="json")]}

    def _generate(self, rank, store, prompts, out, sampling, seed, step, weight_version):
        store, prompts = Store.open(store), Manifest.model_validate(prompts)
        mine = read(store, prompts).to_pylist()[rank :: self.ranks]
        rows = [
            self._sample(prompt, index, weight_version)
            for prompt in mine
            for index in range(sampling["samples_per_prompt"])
        ]
        entry = write_part(store, out, rank, pa.Table.from_pylist(rows, schema=ROLLOUT), ROLLOUT)
        metrics = {"tokens": sum(len(row["response_tokens"]) for row in rows), "seconds": 0.5, "tokens_per_second": 1}
        return {"files": [entry.model_dump(mode="json")], "metrics": metrics}

    def _sample(self, prompt, index, version):
        text = prompt["answer"] if index % 2 == 0 or version >= 2 else "x"
        return {
            "sample_id": f"{prompt['group_id']}/{index}",
            "group_id": prompt["group_id"],
            "prompt_id": prompt["prompt_id"],
            "weight_version": version,
            "prompt_tokens": prompt["prompt_tokens"],
            "response_tokens": [1] * len(text),
            "response_mask": [1] * len(text),
            "rollout_logprobs": [-0.5] * len(text),
            "finish_reason": "stop",
            "text": text,
        }


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Hugging Face folder with a character tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<eos>": 0, "<unk>": 1, **{character: 2 + i for i, character in enumerate(ALPHABET)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<eos>",
                "chat_template": "{% for m in messages %}{{ m.role[0] }} {{ m.content }}<eos>\n{% endfor %}"
                "{% if add_generation_prompt %}a {% endif %}",
            }
        )
    )
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 64,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def prompt_file(tmp_path):
    """Twenty sums as JSON lines."""
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def values(tmp_path, model_folder, prompt_file):
    """A small valid post-training configuration as plain values."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return {
        "experiment": "sums",
        "root": str(tmp_path / "runs"),
        "total_steps": 4,
        "prompts_per_step": 3,
        "checkpoint_every": 2,
        "evaluate_every": 2,
        "model": {"path": str(model_folder)},
        "data": {"path": str(prompt_file)},
        "validation": {"data": {"path": str(held_out)}, "size": 2},
        "generation": {"samples_per_prompt": 2, "max_response_tokens": 8},
    }


@pytest.fixture
def config(values):
    return PostTrainConfig.model_validate(values)


@pytest.fixture
def sft_config(values):
    shared = {key: value for key, value in values.items() if key != "prompts_per_step"}
    fit = {"mini_batch_size": 2, "epochs": 2}
    return SFTConfig.model_validate({**shared, "demonstrations_per_step": 6, "fit": fit})


@pytest.fixture
def pool(monkeypatch):
    """The pool that flows get; replace `pool.current` to lose its state. `pool.others` are those of other names."""

    class Holder:
        current, others = FakePool(), {}

    monkeypatch.setattr("flows.groups.get_pool", lambda config, ranks: Holder.others.get(config.name, Holder.current))
    return Holder


@pytest.fixture(autouse=True)
def stages_without_prefect(monkeypatch):
    """Tasks run as plain functions: these tests are about what is done once, not about Prefect."""

    monkeypatch.setattr(prefect.Task, "__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))

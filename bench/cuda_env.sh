# Sourced: where the CUDA libraries lie that Python's packages brought, for a loader that is asked for their plain names.
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2>/dev/null || true)
links=$(mktemp -d)
for lib in "$site"/nvidia/*/lib; do
  [ -d "$lib" ] || continue
  LD_LIBRARY_PATH="$lib:${LD_LIBRARY_PATH:-}"
  for file in "$lib"/lib{nccl,cublasLt,cublas,nvrtc,cudnn}.so.*; do
    [ -e "$file" ] && ln -sf "$file" "$links/$(basename "${file%%.so.*}").so"
  done
done
export LD_LIBRARY_PATH="$links:${LD_LIBRARY_PATH:-}:/usr/local/cuda/lib64" CUDA_PATH=${CUDA_PATH:-/usr/local/cuda}

# Random tokens in llm.c's 32-bit format, ids below the smallest vocabulary measured: random_tokens FILE
random_tokens() {
  python3 - "$1" <<'PY'
import array, random, sys
random.seed(1)
n = 8_000_000
header = array.array("i", [0] * 256); header[0], header[1], header[2] = 20240801, 7, n
body = array.array("I", (random.randrange(32000) for _ in range(n)))
with open(sys.argv[1], "wb") as f: header.tofile(f); body.tofile(f)
PY
}

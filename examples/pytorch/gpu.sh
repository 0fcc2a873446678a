#!/usr/bin/env bash
# Tries worker.py on the first GPU: the check, load by one worker and by two that share the device,
# and an item that does not fit into its memory. STAGEMESH is the program, else it is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export PYTHONPATH=$PWD/../../sdk/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z "${STAGEMESH:-}" ]]; then
  STAGEMESH=$folder/stagemesh
  (cd ../.. && CGO_ENABLED=0 go build -o "$STAGEMESH" ./services/cmd/stagemesh)
fi
python3 -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name(0))'

# Eight layers of 4096: enough work for a GPU. A row of ones asks for more memory than there is.
python3 - "$folder/worker.py" <<'PYTHON'
import sys

text = open("worker.py").read()
layers = "torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)"
large = "torch.nn.Linear(64, 4096), *[torch.nn.Linear(4096, 4096) for _ in range(8)], torch.nn.Linear(4096, 10)"
run = "        return {\"p\": self.module(x)"
greedy = "        if (x == 1).all(dim=1).any():\n            torch.empty(1 << 42, device=self.device)\n"
assert layers in text and run in text
open(sys.argv[1], "w").write(text.replace(layers, large).replace(run, greedy + run))
PYTHON

mesh() { # NAME REPLICAS: writes a mesh file
  cat > "$folder/$1.yaml" <<YAML
mesh: gpu
stages:
  model:
    runner: {worker: {command: [python3, worker.py], replicas: $2}}
    batch: {max_size: 64}
YAML
}
mesh one '[{devices: ["0"]}]'
mesh two '[{devices: ["0"], shared: true}, {devices: ["0"], shared: true}]'

"$STAGEMESH" check "$folder/worker.py" --max-size 64
for name in one two; do
  echo "== $name on CUDA"
  "$STAGEMESH" bench stage:model --mesh "$folder/$name.yaml" --tensor 'x=FP32[1,64]' \
    --concurrency 1,64,256 --warmup 2s --duration 5s | grep -E 'CALLER|answers'
done

echo "== a row that does not fit, beside others"
"$STAGEMESH" up -c "$folder/one.yaml" --listen 127.0.0.1:18070 --admin 127.0.0.1:18071 --ops 127.0.0.1:18072 2> "$folder/log" &
program=$!
trap 'kill $program 2>/dev/null || true; wait $program || true; rm -rf "$folder"' EXIT
until curl -fs http://127.0.0.1:18070/readyz > /dev/null; do sleep 0.2; kill -0 $program; done
row() { python3 -c 'import sys; print("{\"x\": [[" + ",".join([sys.argv[1]] * 64) + "]]}")' "$1"; }
ask() {
  curl -s -o /dev/stdout -w ' %{http_code}\n' -H 'Content-Type: application/json' -H 'Stagemesh-Timeout: 20s' \
    -d "$(row "$1")" http://127.0.0.1:18070/v1/pipelines/stage:model:infer | tail -c 300
}
calls=()
for value in 0 1 0 0 0; do
  ask "$value" > "$folder/$value.$RANDOM" &
  calls+=($!)
done
wait "${calls[@]}"
tail -qn 2 "$folder"/[01].*

"""Somebody's training command, without torch and without us: what `reshard prove` asks of one, and ways to fail.

python stranger.py [FLAW]
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

flaw = sys.argv[1] if len(sys.argv) > 1 else ""
if flaw == "torchrun":
    # A launcher whose workers have ranks, one of which has a child of its own.
    worker = [sys.executable, __file__, "worker"]
    workers = [
        subprocess.Popen(worker, env={**os.environ, "LOCAL_RANK": str(rank)}, start_new_session=True) for rank in (0, 1)
    ]
    sys.exit(max(abs(each.wait()) for each in workers))
folder, trace = Path(os.environ["RESHARD_CHECKPOINTS"]), Path(os.environ["RESHARD_TRACE"])
steps = int(os.environ["RESHARD_STEPS"])
if flaw == "restarts":
    # A launcher that does not give up.
    while subprocess.run([sys.executable, __file__, "worker"], env={**os.environ, "LOCAL_RANK": "0"}).returncode:
        time.sleep(0.2)
    sys.exit()
if os.environ.get("LOCAL_RANK") == "1":
    loader = subprocess.Popen(["sleep", "317"])
    while not (trace.exists() and f'"step": {steps},' in trace.read_text()):
        time.sleep(0.05)
    loader.kill()
    sys.exit()
interval = int(os.environ.get("RESHARD_INTERVAL") or 5)
folder.mkdir(parents=True, exist_ok=True)
saved = folder / "state.json"
stopped = []
if flaw == "saves when asked":
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))

step = json.loads(saved.read_text())["step"] if saved.exists() and flaw != "forgets" else 0
was_resumed = step > 0
if flaw == "skips" and step:
    step += 1
if flaw == "is short":
    steps = 8
if flaw == "fails" and step:
    sys.exit("Error: the moments are gone")
if flaw == "fails quietly":
    if was_resumed:
        print("the data disk is not mounted", file=sys.stderr)
        sys.exit(7)
    print("ChildFailedError: a line of the start before, about its end", flush=True)
if flaw == "goes on":
    # Kills change nothing: the run is over long before they come.
    steps += 1
    if not was_resumed:
        saved.write_text(json.dumps({"step": steps - 1}))
if flaw == "is early":
    # Saves the end of the run long before it is there.
    (folder / f"step-{steps}").mkdir(exist_ok=True)
    step = steps if was_resumed else 0
with trace.open("a") as out:
    while step < steps and not stopped:
        step += 1
        loss = 3 / step + (1e-9 if flaw == "drifts" and was_resumed and step > 12 else 0.0)
        out.write(json.dumps({"step": step, "loss": loss, "lr": 0.1, "samples": 8 * step}) + "\n")
        out.flush()
        if (step % interval == 0 or stopped) and flaw != "goes on":
            saved.write_text(json.dumps({"step": step}))
            if flaw in ("skips", "is early"):
                # Named as we name them, so that it can be known where the run should go on.
                (folder / f"step-{step}").mkdir(exist_ok=True)
        if flaw == "hangs" and step == 7:
            time.sleep(300)
        time.sleep(0.03)

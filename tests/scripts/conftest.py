import sys
from pathlib import Path

# scripts/ is no package: its modules import each other as a user who runs them would.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

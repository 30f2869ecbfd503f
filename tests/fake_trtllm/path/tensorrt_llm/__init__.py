"""For PYTHONPATH: becomes the fake of the profile that FAKE_TRTLLM_PROFILE names."""

import os
import sys

from tests.fake_trtllm.package import build

sys.modules.update(build(os.environ.get("FAKE_TRTLLM_PROFILE", "main")))

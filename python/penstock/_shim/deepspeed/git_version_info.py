from typing import Dict, List, Optional

from penstock.deepspeed import VERSION

version = VERSION
git_hash: Optional[str] = None
git_branch: Optional[str] = None
installed_ops: Dict[str, bool] = {}
compatible_ops: Dict[str, bool] = {}
accelerator_name: List[str] = []

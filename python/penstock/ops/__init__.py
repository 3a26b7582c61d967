"""DeepSpeed's operators, served by Penstock: ``aio``."""

"""DeepSpeed's operators, served by Penstock: ``aio``, ``adam``, ``adagrad``, ``lamb``, ``lion``."""

from penstock.ops.lamb import FusedLamb as FusedLamb

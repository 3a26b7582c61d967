// NCCL and CUDA's runtime as zero/ranks/comm_nccl.cc uses them, for the ranks of one process, a rank a
// device. A device runs one exchange at a time, in the order in which they were enqueued on it, whatever
// their communicators and streams: no device promises more. An exchange is over when all ranks run it; if
// none of those that the devices run can ever be, all fail.
#ifndef PENSTOCK_TESTS_ZERO_FAKE_NCCL_H_
#define PENSTOCK_TESTS_ZERO_FAKE_NCCL_H_

namespace penstock::zero {

// Forgets everything: `ranks` are to connect.
void ResetFakeNccl(int ranks);
// Communicators that each rank has made, at the most.
int FakeCommunicators();

}  // namespace penstock::zero

#endif  // PENSTOCK_TESTS_ZERO_FAKE_NCCL_H_

// Where memory and devices are on machines with several NUMA nodes; on all others every answer is "anywhere".
#ifndef PENSTOCK_AIO_NUMA_H_
#define PENSTOCK_AIO_NUMA_H_

#include <pthread.h>

#include <string>
#include <string_view>
#include <vector>

namespace penstock::aio {

int NumaNodes();  // at least 1

// The node that a block device ("nvme0n1p2") is attached to; -1 if there is only one node or the device has
// none. An arena for transfers to it is best there (ArenaOptions::numa_node).
int NodeOfDevice(const std::string& device);

// Keeps a thread on the CPUs of a node. False where the node or the right to do so is missing; the thread
// then runs anywhere, which costs a little.
bool PinThreadToNode(pthread_t thread, int node);

// "0-3,8,10-11" as the kernel writes it; what cannot be read is left out.
std::vector<int> ParseCpuList(std::string_view text);

}  // namespace penstock::aio

#endif  // PENSTOCK_AIO_NUMA_H_

// Runs a fuzz target without libFuzzer: every file of its corpus, then seeded mutations of them, the same on
// every machine.
//
//   fuzz_sizes CORPUS_DIRECTORY [MUTATIONS [SEED]]
//
// Exit 0: no promise was broken, and the corpus had both what is taken and what is refused. When a target
// ends the process, the input is left in the current directory as <program>.failed.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "tests/fuzz/fuzz.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kInputMax = 8192;

// Where the handler of a fatal signal finds what to write.
std::string g_failed_path;
const Bytes* g_input = nullptr;

extern "C" void KeepInput(int number) {
  if (g_input != nullptr) {
    const int fd = open(g_failed_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || write(fd, g_input->data(), g_input->size()) < 0) {
      constexpr char kText[] = "the input could not be kept\n";
      if (write(2, kText, sizeof(kText) - 1) < 0) _exit(3);
    }
  }
  signal(number, SIG_DFL);
  raise(number);
}

// One change of the kinds that libFuzzer makes: bits, bytes, numbers at the edge, pieces cut out, doubled and
// taken from other inputs.
void Mutate(Bytes& input, const std::vector<Bytes>& corpus, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const auto piece = [&](const Bytes& from) {
    const size_t begin = below(from.size());
    const size_t bytes = std::min(from.size() - begin, 1 + below(16));
    return Bytes(from.begin() + static_cast<ptrdiff_t>(begin),
                 from.begin() + static_cast<ptrdiff_t>(begin + bytes));
  };
  const auto insert = [&](const Bytes& what) {
    input.insert(input.begin() + static_cast<ptrdiff_t>(below(input.size() + 1)), what.begin(), what.end());
  };
  static constexpr uint8_t kEdges[] = {0, 1, 9, '\n', ' ', '"', '-', '0', '[', '{', 0x7f, 0x80, 0xff};
  if (input.empty()) {
    input.push_back(static_cast<uint8_t>(random()));
    return;
  }
  switch (random() % 8) {
    case 0:
      input[below(input.size())] ^= static_cast<uint8_t>(1u << (random() % 8));
      break;
    case 1:
      input[below(input.size())] = static_cast<uint8_t>(random());
      break;
    case 2:
      input[below(input.size())] = kEdges[below(std::size(kEdges))];
      break;
    case 3: {
      const size_t begin = below(input.size());
      const size_t bytes = std::min(input.size() - begin, 1 + below(16));
      input.erase(input.begin() + static_cast<ptrdiff_t>(begin),
                  input.begin() + static_cast<ptrdiff_t>(begin + bytes));
      break;
    }
    case 4:
      insert(piece(Bytes(input)));
      break;
    case 5:
      if (const Bytes& other = corpus[below(corpus.size())]; !other.empty()) insert(piece(other));
      break;
    case 6:
      insert({static_cast<uint8_t>(random())});
      break;
    case 7:
      input.resize(below(input.size() + 1));
      break;
  }
  if (input.size() > kInputMax) input.resize(kInputMax);
}

void RunOne(const Bytes& input) {
  g_input = &input;
  LLVMFuzzerTestOneInput(input.data(), input.size());
  g_input = nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS_DIRECTORY [MUTATIONS [SEED]]\n", argv[0]);
    return 2;
  }
  const uint64_t mutations = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  const std::string name = std::filesystem::path(argv[0]).filename().string();
  g_failed_path = (std::filesystem::current_path() / (name + ".failed")).string();
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, KeepInput);

  std::vector<std::filesystem::path> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1], error)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no corpus in %s\n", name.c_str(), argv[1]);
    return 1;
  }
  for (const Bytes& input : corpus) RunOne(input);
  const penstock::fuzz::Counts counts = penstock::fuzz::GetCounts();
  if (counts.accepted == 0 || counts.refused == 0) {
    std::fprintf(stderr,
                 "%s: of the corpus %" PRIu64 " inputs were taken and %" PRIu64 " refused; both are needed\n",
                 name.c_str(), counts.accepted, counts.refused);
    return 1;
  }
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < mutations; ++i) {
    Bytes input = corpus[random() % corpus.size()];
    for (uint64_t n = 1 + random() % 6; n != 0; --n) Mutate(input, corpus, random);
    RunOne(input);
  }
  std::printf("%s: %zu inputs and %" PRIu64 " mutations of them; %" PRIu64 " taken, %" PRIu64 " refused\n",
              name.c_str(), corpus.size(), mutations, penstock::fuzz::GetCounts().accepted,
              penstock::fuzz::GetCounts().refused);
  return 0;
}

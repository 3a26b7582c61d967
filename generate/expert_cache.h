// The experts of a mixture in memory: those that a layer of a pass uses, those that are guessed to be used by
// the next layer, and as many others as there is room for, which generate/expert_use.h chooses.
//
//   RETURN_IF_ERROR(cache.Begin(layer, experts));       // reads what is not in memory
//   RETURN_IF_ERROR(cache.Guess(layer + 1, likely));    // in what is left, when nothing else is read
//   while (cache.left() > 0) {
//     ASSIGN_OR_RETURN(const ExpertCache::Held held, cache.Next());   // those in memory first
//     ... compute with held.memory, laid out as WeightSource::experts() ...
//     RETURN_IF_ERROR(cache.Release(held));
//   }
//
// A pass reads an expert at most once for all of its rows, and a layer may use more experts than there are
// places: the others follow as places are given up. A guess that was wrong costs a read, and nothing is
// guessed while the reads of wrong guesses are more than a share of all.
//
// Memory: places of one size, the largest expert's. Threads: one; the engine's own do the transfers. Errors:
// of the read that failed; after one only destruction is left. A guess that cannot be read is none.
#ifndef PENSTOCK_GENERATE_EXPERT_CACHE_H_
#define PENSTOCK_GENERATE_EXPERT_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "aio/engine.h"
#include "generate/expert_use.h"
#include "generate/weight_source.h"

namespace penstock::generate {

struct ExpertStats {
  uint64_t used = 0;           // experts that layers used, once for all rows of a pass
  uint64_t hits = 0;           // of these, that were in memory when the router had chosen; of which
  uint64_t guessed_hits = 0;   // were there by a guess
  uint64_t misses = 0;         // the others
  uint64_t guesses = 0;        // experts that were read by a guess
  uint64_t right_guesses = 0;  // of these, that were used before they were given up
  uint64_t read_bytes = 0, wrong_bytes = 0;  // from the drive, and of these by guesses that were wrong
  double wait_seconds = 0;                   // for reads that began when the router had chosen
  double guess_wait_seconds = 0;             // and for those that a guess had begun
};

class ExpertCache {
 public:
  // Places that a layer computes with at least: one is computed while another is read.
  static constexpr uint64_t kLeastPlaces = 2;

  struct Held {
    int64_t expert = 0;  // of the layer
    std::byte* memory = nullptr;
    size_t place = 0;
  };

  // `layers` of `experts` each, as in WeightUses::experts. `memory`: at 4096, for kLeastPlaces or more. All
  // outlive it.
  ExpertCache(WeightSource* source, aio::Engine* engine, std::span<std::byte> memory, int64_t layers,
              int64_t experts);
  // Waits for what is in flight.
  ~ExpertCache();
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;

  // A layer uses these, each once. All of the layer before have been released.
  absl::Status Begin(int64_t layer, std::span<const int64_t> experts);
  size_t left() const { return left_; }  // that Next has not given out
  // One that is in memory, or that has come; else waits for one.
  absl::StatusOr<Held> Next();
  absl::Status Release(const Held& held);
  // What the layer after the one that computes will use, the likeliest first. What the layer that computes
  // still needs is read before it.
  absl::Status Guess(int64_t layer, std::span<const int64_t> experts);

  size_t places() const { return places_.size(); }
  // Whether every expert is in memory, or on its way there: then there is nothing to guess.
  bool has_all() const { return held_ == all_; }
  const ExpertStats& stats() const { return stats_; }

 private:
  enum class State : uint8_t { kFree, kReading, kThere };
  struct Place {
    State state = State::kFree;
    bool used = false;      // it has had an expert
    size_t expert = 0;      // number of all
    bool wanted = false;    // by the layer that computes, which has not released it
    bool expected = false;  // by a guess, for a layer that comes
    bool wrong = false;     // and its layer has not used it: its bytes count as wrong
    bool guessed = false;   // read by a guess, and not used yet
    std::unique_ptr<ExpertRead> read;
  };

  size_t NumberOf(int64_t layer, int64_t expert) const {
    return static_cast<size_t>(layer * experts_ + expert);
  }
  // Of places, so that what nobody guessed finds one too.
  size_t MostExpected() const { return places_.size() / 2; }
  std::byte* MemoryOf(size_t place) const { return memory_.data() + place * place_bytes_; }
  // A free place, or one of what can be given up whose next use is expected last; nullopt: there is none.
  std::optional<size_t> PlaceFor();
  absl::Status StartRead(size_t place, size_t expert, aio::Priority priority);
  // Starts reads of what the layer needs, as far as there are places.
  absl::Status Pump();
  // And of guesses, when the layer needs no more places.
  absl::Status PumpGuesses();
  // Takes note of wrong guesses that have come.
  absl::Status Reap();
  absl::Status Arrive(size_t place);
  Held Give(size_t place);

  WeightSource& source_;
  aio::Engine& engine_;
  const std::span<std::byte> memory_;
  const int64_t experts_;
  const uint64_t place_bytes_;
  ExpertUse use_;
  std::vector<Place> places_;
  std::vector<int64_t> place_of_;  // by number of the expert; -1: it has none
  std::deque<size_t> ready_;       // places whose experts the layer uses, in memory
  std::deque<size_t> coming_;      // on their way, in the order in which their reads began
  std::deque<size_t> missing_;     // numbers of experts without a place
  std::deque<size_t> guesses_;     // numbers of experts that are guessed and have no place
  const size_t all_;               // experts that there are: some layers may have none
  size_t held_ = 0;                // experts that have a place
  size_t expected_ = 0;            // places that are
  size_t left_ = 0;
  ExpertStats stats_;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_EXPERT_CACHE_H_

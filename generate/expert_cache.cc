#include "generate/expert_cache.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "generate/clock.h"

namespace penstock::generate {
namespace {

// Nothing is guessed while the reads of wrong guesses are more than this part of all reads of experts, and
// the less of it is left, the fewer of the likeliest.
constexpr uint64_t kWrongShare = 13, kWrongShareOfNext = 1;

}  // namespace

ExpertCache::ExpertCache(WeightSource* source, aio::Engine* engine, std::span<std::byte> memory,
                         int64_t layers, int64_t experts)
    : source_(*source),
      engine_(*engine),
      memory_(memory),
      experts_(experts),
      place_bytes_(source->largest_expert_bytes()),
      use_(layers, experts),
      places_(memory.size() / place_bytes_),
      place_of_(static_cast<size_t>(layers * experts), -1),
      all_(static_cast<size_t>(std::count_if(source->experts().begin(), source->experts().end(),
                                             [](const WeightUnit& expert) { return expert.bytes > 0; }))) {
  PENSTOCK_CHECK(places_.size() >= kLeastPlaces, "experts have the places that were planned for them");
  for (Place& place : places_) place.read = std::make_unique<ExpertRead>();
}

ExpertCache::~ExpertCache() {
  for (Place& place : places_) {
    if (place.state != State::kReading) continue;
    for (size_t i = 0; i < place.read->started; ++i) engine_.Cancel(&place.read->requests[i]);
    source_.FinishExpert(place.read.get()).IgnoreError();
  }
}

std::optional<size_t> ExpertCache::PlaceFor() {
  std::optional<size_t> best;
  double longest = -1;
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (place.state == State::kFree) return i;
    if (place.state != State::kThere || place.wanted || place.expected) continue;
    const double wait = use_.ExpectedWait(place.expert);
    if (wait <= longest) continue;
    longest = wait;
    best = i;
  }
  return best;
}

absl::Status ExpertCache::StartRead(size_t number, size_t expert, aio::Priority priority) {
  Place& place = places_[number];
  if (place.state == State::kThere) {
    place_of_[place.expert] = -1;
    if (place.guessed && !place.wrong) stats_.wrong_bytes += source_.experts()[place.expert].bytes;
  }
  place.state = State::kFree;
  place.wanted = place.expected = place.guessed = place.wrong = false;
  RETURN_IF_ERROR(source_.StartExpert(expert, MemoryOf(number), priority, place.read.get()));
  if (!place.used) ++held_;
  place.used = true;
  place.state = State::kReading;
  place.expert = expert;
  place_of_[expert] = static_cast<int64_t>(number);
  stats_.read_bytes += source_.experts()[expert].bytes;
  return absl::OkStatus();
}

absl::Status ExpertCache::Arrive(size_t number) {
  Place& place = places_[number];
  const double begin = Now();
  if (absl::Status read = source_.FinishExpert(place.read.get()); !read.ok()) {
    if (place.wanted) return read;
    // Nothing asks for it, and who does reads it again.
    if (place.expected) --expected_;
    place_of_[place.expert] = -1;
    --held_;
    place = {.read = std::move(place.read)};
    return absl::OkStatus();
  }
  place.state = State::kThere;
  if (place.wanted) (place.guessed ? stats_.guess_wait_seconds : stats_.wait_seconds) += Now() - begin;
  return absl::OkStatus();
}

absl::Status ExpertCache::Begin(int64_t layer, std::span<const int64_t> experts) {
  PENSTOCK_CHECK(left_ == 0 && ready_.empty() && coming_.empty() && missing_.empty(),
                 "a layer has used its experts before the next one begins");
  use_.EnterLayer(layer);
  RETURN_IF_ERROR(Reap());
  // What was guessed is known now.
  for (Place& place : places_) place.expected = false;
  expected_ = 0;
  guesses_.clear();
  left_ = experts.size();
  for (const int64_t expert : experts) {
    const size_t number = NumberOf(layer, expert);
    use_.Touch(number);
    ++stats_.used;
    const int64_t at = place_of_[number];
    if (at < 0) {
      ++stats_.misses;
      missing_.push_back(number);
      continue;
    }
    Place& place = places_[static_cast<size_t>(at)];
    place.wanted = true;
    if (place.guessed) ++stats_.right_guesses;
    // A later pass wants what was guessed in vain before.
    if (std::exchange(place.wrong, false)) stats_.wrong_bytes -= source_.experts()[number].bytes;
    if (place.state == State::kThere) {
      ++stats_.hits;
      if (std::exchange(place.guessed, false)) ++stats_.guessed_hits;
      ready_.push_back(static_cast<size_t>(at));
    } else {
      ++stats_.misses;
      coming_.push_back(static_cast<size_t>(at));
    }
  }
  // What was guessed for this layer in vain counts at once, so that no more is guessed than that allows.
  for (Place& place : places_) {
    if (!place.guessed || place.wanted || place.wrong ||
        static_cast<int64_t>(place.expert) / experts_ != layer)
      continue;
    place.wrong = true;
    stats_.wrong_bytes += source_.experts()[place.expert].bytes;
  }
  return Pump();
}

absl::Status ExpertCache::Pump() {
  while (!missing_.empty()) {
    const std::optional<size_t> place = PlaceFor();
    if (!place.has_value()) return absl::OkStatus();
    RETURN_IF_ERROR(StartRead(*place, missing_.front(), aio::Priority::kDemand));
    places_[*place].wanted = true;
    coming_.push_back(*place);
    missing_.pop_front();
  }
  return PumpGuesses();
}

ExpertCache::Held ExpertCache::Give(size_t place) {
  --left_;
  places_[place].guessed = false;
  return {static_cast<int64_t>(places_[place].expert) % experts_, MemoryOf(place), place};
}

absl::StatusOr<ExpertCache::Held> ExpertCache::Next() {
  PENSTOCK_CHECK(left_ > 0, "no more experts are taken than a layer uses");
  RETURN_IF_ERROR(Pump());
  if (ready_.empty() && coming_.empty()) {
    // Wrong guesses are on their way to all places: the first that has come gives its own up.
    for (size_t i = 0; i < places_.size() && coming_.empty(); ++i) {
      if (places_[i].state == State::kReading) RETURN_IF_ERROR(Arrive(i));
      RETURN_IF_ERROR(Pump());
    }
  }
  if (!ready_.empty()) {
    const size_t place = ready_.front();
    ready_.pop_front();
    return Give(place);
  }
  PENSTOCK_CHECK(!coming_.empty(), "what a layer holds of the experts leaves a place for the next");
  auto next = std::find_if(coming_.begin(), coming_.end(),
                           [this](size_t place) { return places_[place].read->finished(); });
  if (next == coming_.end()) next = coming_.begin();
  const size_t place = *next;
  coming_.erase(next);
  RETURN_IF_ERROR(Arrive(place));
  return Give(place);
}

absl::Status ExpertCache::Release(const Held& held) {
  places_[held.place].wanted = false;
  return Pump();
}

absl::Status ExpertCache::Guess(int64_t layer, std::span<const int64_t> experts) {
  RETURN_IF_ERROR(Reap());
  for (Place& place : places_) place.expected = false;
  expected_ = 0;
  guesses_.clear();
  uint64_t share = kWrongShare;
  for (const int64_t expert : experts) {
    if (stats_.wrong_bytes * share > stats_.read_bytes) break;
    share += kWrongShareOfNext;
    const size_t number = NumberOf(layer, expert);
    const int64_t at = place_of_[number];
    if (at < 0) {
      guesses_.push_back(number);
    } else if (expected_ < MostExpected()) {
      places_[static_cast<size_t>(at)].expected = true;
      ++expected_;
    }
  }
  return PumpGuesses();
}

absl::Status ExpertCache::PumpGuesses() {
  while (!guesses_.empty() && missing_.empty() && expected_ < MostExpected()) {
    const std::optional<size_t> place = PlaceFor();
    if (!place.has_value()) return absl::OkStatus();
    const absl::Status begun = StartRead(*place, guesses_.front(), aio::Priority::kWriteBehind);
    guesses_.pop_front();
    if (!begun.ok()) return absl::OkStatus();  // nothing asks for it, and who does has the error
    places_[*place].expected = places_[*place].guessed = true;
    ++expected_;
    ++stats_.guesses;
  }
  return absl::OkStatus();
}

absl::Status ExpertCache::Reap() {
  for (size_t i = 0; i < places_.size(); ++i) {
    const Place& place = places_[i];
    if (place.state == State::kReading && !place.wanted && place.read->finished()) RETURN_IF_ERROR(Arrive(i));
  }
  return absl::OkStatus();
}

}  // namespace penstock::generate

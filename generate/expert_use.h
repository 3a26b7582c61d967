// Which experts of a mixture are worth their memory: how often, and how lately, routers chose each.
//
// A pass goes through the layers in order, so what is known is how soon a layer computes again; not whether
// it takes an expert again. The chance of that is estimated by a decayed frequency, raised for what was
// chosen in the passes just before, as some routers choose alike for tokens that follow each other:
//
//   chance = sum over the passes that used it of 0.02 * 0.98^age, plus r * 0.5^(passes since the last)
//
// r is what experts of a pass are chosen again in the next one beyond their frequencies, as it was in the
// passes so far (0.99^age). Chosen by simulation over recorded routes (tests/tools/expert_use_test.cc).
//
// The expert that is needed last, as far as can be expected, is given up first: its layer's turn, and
// (1 / chance - 1) passes more. (Belady 1966 gives up what is needed last; here that is estimated.)
//
// Pure numbers: the same calls give the same answers. Threads: one.
#ifndef PENSTOCK_GENERATE_EXPERT_USE_H_
#define PENSTOCK_GENERATE_EXPERT_USE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::generate {

class ExpertUse {
 public:
  // Expert e of layer i is number i * experts + e.
  ExpertUse(int64_t layers, int64_t experts);

  // A layer computes; one that is not behind the last one begins another pass.
  void EnterLayer(int64_t layer);
  // The layer that computes uses an expert of its own.
  void Touch(size_t expert);
  // Layers from now until the expert is needed again, as far as can be expected.
  double ExpectedWait(size_t expert) const;

 private:
  double Chance(size_t expert) const;

  struct Used {
    double frequency = 0;  // as of `pass`
    int64_t pass = -1;     // of the last use; -1: there was none
  };
  size_t AgeOf(const Used& used) const;  // in passes

  const int64_t layers_, experts_;
  std::vector<double> kept_, halved_;  // by age: of a frequency, and of what the last use adds to a chance
  std::vector<Used> used_;
  // Of the uses so far, decayed: those by the pass before too, and how many would be by their frequencies.
  double uses_ = 0, again_ = 0, expected_again_ = 0;
  int64_t pass_ = 0, layer_ = -1;
};

}  // namespace penstock::generate

#endif  // PENSTOCK_GENERATE_EXPERT_USE_H_

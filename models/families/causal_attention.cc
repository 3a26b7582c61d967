#include "models/families/causal_attention.h"

#include <torch/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>

namespace penstock::models {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Calls visit(first, rows, from, seen) for the blocks of queries in order: rows [first, first + rows) see
// some of the `seen` keys from `from` on, and no others.
template <typename Visit>
void ForEachBlock(int64_t length, int64_t window, Visit visit) {
  for (int64_t first = 0; first < length; first += kQueryRows) {
    const int64_t rows = std::min(kQueryRows, length - first);
    const int64_t from = window > 0 ? std::max<int64_t>(0, first + 1 - window) : 0;
    visit(first, rows, from, first + rows - from);
  }
}

// Rows [first, first + rows) of every head, those of the heads that share keys one after the other:
// [key heads, group * rows, depth] of [key heads, group, length, depth]; without groups a view.
Tensor Rows(const Tensor& x, int64_t first, int64_t rows) {
  const Tensor some = x.narrow(2, first, rows);
  return some.size(1) == 1 ? some.squeeze(1)
                           : some.reshape({some.size(0), some.size(1) * rows, some.size(3)});
}
// Puts such rows back.
void PutRows(const Tensor& rows, int64_t first, const Tensor& to) {
  const int64_t group = to.size(1), count = rows.size(1) / group;
  to.narrow(2, first, count).copy_(rows.view({to.size(0), group, count, to.size(3)}));
}

// [key heads, group * rows, seen] of queries scaled already, the last `rows` of those who see these keys.
// `capped`: takes the scores under a cap, before any is masked.
Tensor Probabilities(const Tensor& queries, const Tensor& keys, int64_t group, const AttentionForm& form,
                     Tensor* capped = nullptr) {
  const int64_t rows = queries.size(1) / group, seen = keys.size(1);
  Tensor scores = torch::bmm(queries, keys.transpose(1, 2));
  if (form.cap > 0) {
    scores = torch::tanh(scores / form.cap) * form.cap;
    if (capped != nullptr) *capped = scores.clone();
  }
  const auto mask = [&](const Tensor& among, Tensor hidden) {
    if (group > 1) hidden = hidden.repeat({group, 1});
    among.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  };
  const auto bits = scores.options().dtype(torch::kBool);
  // A view of all of it would cost autograd a copy of the gradient.
  mask(seen == rows ? scores : scores.narrow(2, seen - rows, rows),
       torch::ones({rows, rows}, bits).triu_(/*diagonal=*/1));
  // Key j of row i: j + window <= i + seen - rows.
  if (form.window > 0 && seen > form.window)
    mask(scores, torch::ones({rows, seen}, bits).tril_(seen - rows - form.window));
  return torch::softmax(scores, -1);
}

// By autograd, which keeps the probabilities. `q` has the rows of the heads that share keys one after the
// other.
Tensor InOnePiece(const Tensor& q, const Tensor& k, const Tensor& v, int64_t group,
                  const AttentionForm& form) {
  const Tensor p = Probabilities(q, k, group, form);
  return torch::bmm(form.dropout > 0 ? torch::dropout(p, form.dropout, /*train=*/true) : p, v);
}

// What stays of probabilities of this shape, a byte each.
Tensor DrawKept(const Tensor& p, double dropout) {
  return torch::empty(p.sizes(), p.options().dtype(torch::kBool)).bernoulli_(1 - dropout);
}
Tensor Thinned(const Tensor& p, const Tensor& kept, double dropout) { return p * kept * (1 / (1 - dropout)); }

// The queries come scaled, so that their gradient needs no factor here, and as [key heads, group, length,
// depth].
class ScaledAttention : public torch::autograd::Function<ScaledAttention> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        double dropout, int64_t window, double cap) {
    const AttentionForm form = {.dropout = dropout, .window = window, .cap = cap};
    const int64_t group = q.size(1);
    Tensor out = group == 1 ? torch::empty_like(v).unsqueeze(1)
                            : torch::empty({q.size(0), group, q.size(2), v.size(2)}, v.options());
    variable_list saved = {q, k, v};
    ForEachBlock(q.size(2), window, [&](int64_t first, int64_t rows, int64_t from, int64_t seen) {
      Tensor p = Probabilities(Rows(q, first, rows), k.narrow(1, from, seen), group, form);
      if (dropout > 0) {
        saved.push_back(DrawKept(p, dropout));
        p = Thinned(p, saved.back(), dropout);
      }
      PutRows(torch::bmm(p, v.narrow(1, from, seen)), first, out);
    });
    context->save_for_backward(saved);
    context->saved_data["dropout"] = dropout;
    context->saved_data["window"] = window;
    context->saved_data["cap"] = cap;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const double dropout = context->saved_data["dropout"].toDouble();
    const AttentionForm form = {.dropout = dropout,
                                .window = context->saved_data["window"].toInt(),
                                .cap = context->saved_data["cap"].toDouble()};
    const int64_t group = q.size(1);
    const Tensor& out_gradient = gradients[0];
    const auto sums = k.options().dtype(torch::promote_types(k.scalar_type(), torch::kFloat32));
    Tensor dq = torch::empty_like(q), dk = torch::zeros(k.sizes(), sums), dv = torch::zeros(v.sizes(), sums);
    ForEachBlock(q.size(2), form.window, [&](int64_t first, int64_t rows, int64_t from, int64_t seen) {
      const Tensor queries = Rows(q, first, rows), keys = k.narrow(1, from, seen);
      const Tensor gradient = Rows(out_gradient, first, rows);
      Tensor capped;
      const Tensor p = Probabilities(queries, keys, group, form, &capped);
      Tensor dp = torch::bmm(gradient, v.narrow(1, from, seen).transpose(1, 2));
      if (dropout > 0) {
        const Tensor& kept = saved[static_cast<size_t>(3 + first / kQueryRows)];
        dv.narrow(1, from, seen).add_(torch::bmm(Thinned(p, kept, dropout).transpose(1, 2), gradient));
        dp = Thinned(dp, kept, dropout);
      } else {
        dv.narrow(1, from, seen).add_(torch::bmm(p.transpose(1, 2), gradient));
      }
      Tensor ds = at::_softmax_backward_data(dp, p, -1, p.scalar_type());
      if (form.cap > 0) ds = ds * (1 - (capped / form.cap).square());
      dk.narrow(1, from, seen).add_(torch::bmm(ds.transpose(1, 2), queries));
      PutRows(torch::bmm(ds, keys), first, dq);
    });
    return {dq, dk.to(k.scalar_type()), dv.to(v.scalar_type()), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor CausalAttention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionForm& form) {
  const int64_t length = q.size(1), depth = q.size(2), key_heads = k.size(0), group = q.size(0) / key_heads;
  const Tensor scaled = q * form.scale;
  if (length <= kWholeLength) {
    const Tensor joined = group == 1 ? scaled : scaled.reshape({key_heads, group * length, depth});
    const Tensor out = InOnePiece(joined, k, v, group, form);
    return group == 1 ? out : out.view({q.size(0), length, v.size(2)});
  }
  const Tensor grouped = group == 1 ? scaled.unsqueeze(1) : scaled.reshape({key_heads, group, length, depth});
  const Tensor out = ScaledAttention::apply(grouped, k, v, form.dropout, form.window, form.cap);
  return group == 1 ? out.squeeze(1) : out.reshape({q.size(0), length, v.size(2)});
}

Tensor AttentionOfLast(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionForm& form) {
  const int64_t rows = q.size(1), key_heads = k.size(0), group = q.size(0) / key_heads;
  const Tensor scaled = (q * form.scale).reshape({key_heads, group * rows, q.size(2)});
  const Tensor out = InOnePiece(scaled, k, v, group, form);
  return out.reshape({q.size(0), rows, v.size(2)});
}

}  // namespace penstock::models

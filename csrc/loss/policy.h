// The policy objective of one token, with its derivatives: what rlcore/trainer/objective.py and
// rlcore/algos/{ppo,grpo,dapo}.py compute, for losses that look at one token at a time.
//
//   log r  = logp - old_log_probs            clamped to +-log_limit, no gradient beyond
//   policy = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
//   policy = min(policy, -clip_dual A)  where A < 0 and clip_dual is finite and above 0
//   w      = min(p_old / p_sampler, is_threshold) / is_mean            (truncate), else 1
//   keep   = is_low <= log p_sampler / p_old <= is_high                (mask), else true
//   loss   = keep (w policy + kl_coef KL - entropy_coef H)
//
// w and keep have no gradient. Sums over tokens take loss * weight; the gradients hold the weight.
// A token of weight 0 is not trained: its loss, KL and gradients are 0 whatever its inputs are.
// NaN spreads as in torch.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/hd.h"
#include "loss/logits.h"

namespace rlcore::loss {

// Where each setting lies in the `params` of policy_tokens and policy_rows.
enum PolicyParam : int {
  kClipLow,
  kClipHigh,
  kClipDual,     // 0 or inf: off
  kIsMode,       // 0 none, 1 truncate, 2 mask, 3 both
  kIsThreshold,  // cap of the weight, inf does not truncate
  kIsLow,        // bounds of log p_sampler / p_old, both within
  kIsHigh,
  kIsMean,  // the weights are divided by it
  kKlType,  // KlType
  kKlCoef,  // 0 leaves the KL out, also from the rows below
  kEntropyCoef,
  kLogLimit,
  kOldIsOwn,  // not 0: old_log_probs is logp of this very pass, detached, and is not read
  kNumPolicyParams,
};

enum KlType : int { kNone, kK1, kK2, kK3, kAbs, kLowVarKl, kK1Plus, kK3Plus, kNumKlTypes };

// The rows of `out` [kNumPolicyRows, T].
enum PolicyRow : int {
  kLoss,         // per token, without its weight
  kGradLogp,     // d (loss weight) / d logp
  kGradEntropy,  // d (loss weight) / d entropy
  kRatio,        // r
  kIsWeight,     // w
  kClipped,      // 1 where the clip holds
  kDualClipped,  // 1 where the dual clip holds
  kKl,           // KL estimate
  kPolicyLoss,   // w policy
  kKept,         // 0 where masked by is_mode 2
  kNumPolicyRows,
};

struct PolicySettings {
  double value[kNumPolicyParams];
};

// The inputs of the tokens, [T] each, float or double as the logits' statistics are.
struct PolicyInputs {
  const void* old_log_probs;
  const void* rollout_log_probs;
  const void* ref_log_probs;  // null without a KL
  const void* advantage;
  const void* weight;
};

// policy_tokens: the objective of [count] tokens whose log-probs are known.
struct TokensParams {
  const void* logp;
  const void* entropy;
  PolicyInputs inputs;
  PolicySettings settings;
  void* out;  // [kNumPolicyRows, count]
  int64_t count;
  bool is_double;
};

// policy_rows: the objective from whole rows of logits. Logits become their gradient. Rows of
// weight 0 are not read: their logp and entropy are given as 0, their gradient is 0.
struct PolicyRowsParams {
  Logits logits;
  PolicyInputs inputs;
  PolicySettings settings;
  void* stats;  // [2, rows]: logp, entropy
  void* out;    // [kNumPolicyRows, rows]
};

template <class Real>
struct TokenInputs {
  Real logp, entropy, old_log_probs, rollout_log_probs, ref_log_probs, advantage, weight;
};

template <class Real>
struct TokenOutputs {
  Real row[kNumPolicyRows];
};

// torch.clamp: NaN stays NaN.
template <class Real>
RL_HD Real clamp(Real v, Real low, Real high) {
  return v < low ? low : (v > high ? high : v);
}

// KL estimate and its derivative by logp, d = ref_log_probs - logp. rlcore/algos/kl.py.
template <class Real>
RL_HD void kl_estimate(int type, Real d, Real& value, Real& slope) {
  const Real expm1 = std::expm1(d);
  switch (type) {
    case kK1:
      value = -d, slope = 1;
      break;
    case kK2:
      value = d * d / 2, slope = -d;
      break;
    case kK3:
      value = expm1 - d, slope = -expm1;
      break;
    case kAbs:
      value = std::fabs(d), slope = static_cast<Real>(d < 0) - static_cast<Real>(d > 0);
      break;
    case kLowVarKl: {
      const Real held = clamp(d, Real(-20), Real(20)), growth = std::expm1(held);
      const Real k3 = growth - held;
      value = clamp(k3, Real(-10), Real(10));
      slope = (d < Real(-20) || d > Real(20) || k3 > Real(10)) ? Real(0) : -growth;
      break;
    }
    case kK1Plus:
      value = -d, slope = -d;
      break;
    case kK3Plus:
      value = expm1 - d, slope = -d;
      break;
    default:
      value = 0, slope = 0;
  }
}

template <class Real>
RL_HD TokenOutputs<Real> policy_token(const TokenInputs<Real>& x, const PolicySettings& settings) {
  const auto setting = [&](int i) { return static_cast<Real>(settings.value[i]); };
  const bool trained = !(x.weight == 0);
  const Real limit = setting(kLogLimit);
  const Real old_log_probs = setting(kOldIsOwn) != 0 ? x.logp : x.old_log_probs;

  const Real log_w = trained ? old_log_probs - x.rollout_log_probs : Real(0);
  const int mode = static_cast<int>(settings.value[kIsMode]);
  Real w = 1;
  if (mode & 1) {
    w = std::exp(clamp(log_w, -limit, limit));
    w = (w > setting(kIsThreshold) ? setting(kIsThreshold) : w) / setting(kIsMean);
  }
  const Real k1 = -clamp(log_w, -limit, limit);
  const bool kept = !(mode & 2) || !(k1 < setting(kIsLow) || k1 > setting(kIsHigh));

  const Real log_ratio = x.logp - old_log_probs;
  const Real ratio = std::exp(clamp(log_ratio, -limit, limit));
  const Real slope = (log_ratio < -limit || log_ratio > limit) ? Real(0) : ratio;
  const Real low = static_cast<Real>(1 - settings.value[kClipLow]);
  const Real high = static_cast<Real>(1 + settings.value[kClipHigh]);
  const Real free = -ratio * x.advantage, held = -clamp(ratio, low, high) * x.advantage;
  const Real free_slope = -x.advantage * slope;
  const Real held_slope = (ratio < low || ratio > high) ? Real(0) : free_slope;
  Real policy = free, policy_slope = free_slope;
  if (held > free) {
    policy = held, policy_slope = held_slope;
  } else if (held == free) {  // the gradient of torch.maximum
    policy_slope = (free_slope + held_slope) / 2;
  }
  const Real ceiling = -setting(kClipDual) * x.advantage;
  const bool over = setting(kClipDual) > 0 && std::isfinite(setting(kClipDual)) &&
                    x.advantage < 0 && policy > ceiling;
  if (over) policy = ceiling, policy_slope = 0;

  Real kl = 0, kl_slope = 0;
  if (setting(kKlCoef) != 0 && trained) {
    kl_estimate(static_cast<int>(settings.value[kKlType]), x.ref_log_probs - x.logp, kl, kl_slope);
  }
  const Real loss = policy * w + setting(kKlCoef) * kl - setting(kEntropyCoef) * x.entropy;
  const bool counts = trained && kept;
  TokenOutputs<Real> out;
  out.row[kLoss] = counts ? loss : Real(0);
  out.row[kGradLogp] =
      counts ? (policy_slope * w + setting(kKlCoef) * kl_slope) * x.weight : Real(0);
  out.row[kGradEntropy] = counts ? -setting(kEntropyCoef) * x.weight : Real(0);
  out.row[kRatio] = ratio;
  out.row[kIsWeight] = w;
  out.row[kClipped] = static_cast<Real>(held > free);
  out.row[kDualClipped] = static_cast<Real>(over);
  out.row[kKl] = kl;
  out.row[kPolicyLoss] = policy * w;
  out.row[kKept] = static_cast<Real>(kept);
  return out;
}

template <class Real>
RL_HD TokenInputs<Real> token_inputs(const PolicyInputs& p, int64_t token, Real logp,
                                     Real entropy) {
  const auto at = [&](const void* values) {
    return values ? static_cast<const Real*>(values)[token] : Real(0);
  };
  return {logp,
          entropy,
          at(p.old_log_probs),
          at(p.rollout_log_probs),
          at(p.ref_log_probs),
          at(p.advantage),
          at(p.weight)};
}

}  // namespace rlcore::loss

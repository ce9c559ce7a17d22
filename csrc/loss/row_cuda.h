// Launchers of the row kernels. They return a cudaError_t as int and allocate nothing.
#pragma once

#include "loss/logits.h"
#include "loss/policy.h"

extern "C" {

int rlcore_row_stats(const rlcore::loss::StatsParams* params, void* stream);
int rlcore_row_grad(const rlcore::loss::GradParams* params, void* stream);
int rlcore_policy_tokens(const rlcore::loss::TokensParams* params, void* stream);

// Reads every row twice and writes it once.
int rlcore_policy_rows(const rlcore::loss::PolicyRowsParams* params, void* stream);
}

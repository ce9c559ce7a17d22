// The collectives of NCCL, by gloo over the memory of the pretend device, on a stream of their own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "kernels.h"

namespace pretend {

using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Nccl final : public c10d::Backend {
 public:
  explicit Nccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return now("broadcast", {}, tensors, [&] {
      auto on_host = host(tensors);
      gloo_->broadcast(on_host, options)->wait();
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return now("allreduce", {}, tensors, [&] { sum(host(tensors), options.reduceOp); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return now("reduce", {}, tensors, [&] {
      Tensors total{host(tensors)[0].clone()};  // only the root's tensor changes
      sum(total, options.reduceOp);
      if (getRank() == options.rootRank) host(tensors)[0].copy_(total[0]);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins,
                    const c10d::AllgatherOptions&) override {
    return now("allgather", ins, outs[0], [&] { gather_all(host(outs[0]), host(ins)[0]); });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    return now("_allgather_base", {in}, {out}, [&] {
      gather_all(host({out})[0].view({getSize(), -1}).unbind(), host({in})[0].view({-1}));
    });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::AllgatherOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outs.size(); ++i) last = _allgather_base(outs[i], ins[i], options);
    return last;
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in,
                               const c10d::ReduceScatterOptions& options) override {
    return now("_reduce_scatter_base", {in}, {out}, [&] {
      Tensors total{host({in})[0].clone()};
      sum(total, options.reduceOp);
      host({out})[0].view({-1}).copy_(total[0].view({getSize(), -1})[getRank()]);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins,
                                          const c10d::ReduceScatterOptions& options) override {
    WorkPtr last;
    for (size_t i = 0; i < outs.size(); ++i) last = _reduce_scatter_base(outs[i], ins[i], options);
    return last;
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins,
                         const c10d::ReduceScatterOptions& options) override {
    return now("reduce_scatter", ins[0], outs, [&] {
      Tensors total{at::stack(host(ins[0]))};
      sum(total, options.reduceOp);
      host(outs)[0].copy_(total[0][getRank()]);
    });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes,
                        const c10d::AllToAllOptions& options) override {
    return now("alltoall_base", {in}, {out}, [&] {
      Tensor to = host({out})[0], from = host({in})[0];
      gloo_->alltoall_base(to, from, out_sizes, in_sizes, options)->wait();
    });
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions&) override {
    return now("alltoall", ins, outs, [&] {
      Tensors to = host(outs), from = host(ins);
      std::vector<WorkPtr> works;
      for (int r = 0; r < getSize(); ++r) {
        Tensors sent{from[r]}, received{to[r]};
        if (r == getRank()) {
          to[r].copy_(from[r]);
          continue;
        }
        if (sent[0].numel()) works.push_back(gloo_->send(sent, r, kTag));
        if (received[0].numel()) works.push_back(gloo_->recv(received, r, kTag));
      }
      for (auto& work : works) work->wait();
    });
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins,
                 const c10d::GatherOptions& options) override {
    return now("gather", ins, outs.empty() ? Tensors{} : outs[0], [&] {
      Tensors from = host(ins);
      std::vector<Tensors> to;
      for (auto& tensors : outs) to.push_back(host(tensors));
      gloo_->gather(to, from, options)->wait();
    });
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins,
                  const c10d::ScatterOptions& options) override {
    return now("scatter", ins.empty() ? Tensors{} : ins[0], outs, [&] {
      Tensors to = host(outs);
      std::vector<Tensors> from;
      for (auto& tensors : ins) from.push_back(host(tensors));
      gloo_->scatter(to, from, options)->wait();
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    synchronize_device();
    return now("barrier", {}, {}, [&] { gloo_->barrier(options)->wait(); });
  }
  // Sends and receives go on while the host does: rank 0 may send before rank 1 has received.
  WorkPtr send(Tensors& tensors, int rank, int) override {
    auto on_host = begin("send", tensors, {});
    return later(gloo_->send(on_host, rank, kTag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int rank, int) override {
    auto on_host = begin("recv", {}, tensors);
    return later(gloo_->recv(on_host, rank, kTag), tensors);
  }
  void startCoalescing() override { together_.emplace(); }
  WorkPtr endCoalescing() override {
    auto all = c10::make_intrusive<Done>(Tensors{});
    for (auto& work : *together_) all->parts.push_back(std::move(work));
    together_.reset();
    return all;
  }

 private:
  static constexpr int kTag = 0;

  // What a collective returns: the current stream waits for it, and with a deadline the host.
  struct Done : c10d::Work {
    explicit Done(Tensors tensors) : outs(std::move(tensors)) {}
    bool isCompleted() override { return true; }
    bool isSuccess() const override { return true; }
    bool wait(std::chrono::milliseconds deadline) override {
      for (auto& part : parts) part->wait();
      parts.clear();
      std::unique_lock guard(lock);
      const Clock clock = clocks[kNccl];
      guard.unlock();
      stream_waits(current_stream, clock);
      if (deadline != kNoTimeout) host_waits(clock);
      return true;
    }
    void synchronize() override { wait(kNoTimeout); }
    Tensors result() override { return outs; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
      auto future =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      future->markCompleted(IValue(outs));
      return future;
    }
    Tensors outs;
    std::vector<WorkPtr> parts;
  };

  static Tensors host(const Tensors& tensors) {
    Tensors made;
    for (const Tensor& t : tensors) made.push_back(on_cpu(t));
    return made;
  }

  // Launch on the stream of collectives, which waits for the current one.
  Tensors begin(const char* name, const Tensors& ins, const Tensors& outs) {
    for (const auto* tensors : {&ins, &outs})
      for (const Tensor& t : *tensors) {
        TORCH_CHECK(t.is_cuda(), "No backend type associated with device type ", t.device().type());
        TORCH_CHECK(t.is_contiguous(), "Tensors must be contiguous (", name, " of NCCL)");
      }
    std::unique_lock guard(lock);
    const Clock clock = clocks[current_stream];
    guard.unlock();
    stream_waits(kNccl, clock);
    const Launch launch(name, kNccl);
    for (const Tensor& t : ins) launch.reads(t);
    for (const Tensor& t : outs) launch.writes(t);
    return host(ins.empty() ? outs : ins);
  }

  WorkPtr later(WorkPtr work, const Tensors& tensors) {
    auto done = c10::make_intrusive<Done>(tensors);
    done->parts.push_back(std::move(work));
    if (together_) together_->push_back(done);
    return done;
  }

  template <class Body>
  WorkPtr now(const char* name, const Tensors& ins, const Tensors& outs, Body body) {
    begin(name, ins, outs);
    c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset);
    bool hollow = false;
    for (const auto* tensors : {&ins, &outs})
      for (const Tensor& t : *tensors) hollow |= is_hollow(t);
    if (!hollow) body();
    return c10::make_intrusive<Done>(outs);
  }

  // Reduce over all ranks in place. Gloo has no average.
  void sum(Tensors tensors, const c10d::ReduceOp& op) {
    const bool average = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = average ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    for (Tensor& t : tensors) {
      Tensors one{t};
      gloo_->allreduce(one, options)->wait();
      if (average) t.div_(getSize());
    }
  }

  void gather_all(const Tensors& outs, const Tensor& in) {
    outs[getRank()].copy_(in);
    for (int r = 0; r < getSize(); ++r) {
      Tensors one{outs[r]};
      c10d::BroadcastOptions options;
      options.rootRank = r;
      gloo_->broadcast(one, options)->wait();
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::optional<std::vector<WorkPtr>> together_;
};

}  // namespace pretend

// One pass of Adam or AdamW over a flat chunk, or of adding up gradients or their squares, on threads of its own. Plain C++ and a C interface: it
// needs no torch header.
//
// Every number is computed as torch's single-tensor AdamW computes it, down to the last bit: the same fp32 operations in the
// same order, fused multiply-adds where torch's code has them and nowhere else (-ffp-contract=off), and the square roots that
// torch takes. The scalars come rounded from adamw.py.
//
// A thread goes through a contiguous stretch of the chunk block by block: each number is read from memory once and written once.
// Where memory has several nodes, a stretch is that of threads which run on the node that it lies on (pages.py).

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t BLOCK = 64;                  // elements: whole cache lines, and few enough that blocks overlap in the processor
constexpr int64_t GROUP = 1024;                // elements whose squares are added up by one thread; stretches begin at groups
constexpr int64_t AHEAD = 8 * BLOCK;           // elements: how far ahead of the work memory is asked for
constexpr int64_t GRAIN = 32 * 1024;           // elements that a thread takes at once
constexpr int64_t WORTH_A_THREAD = 16 * 1024;  // elements: less takes no longer than waking a thread

}  // namespace

// Mirrored by adamw.py, field by field.
struct Update {
    const void* weights;  // bf16 where low is given, else fp32
    const int16_t* low;
    const float* m;
    const float* v;
    const void* gradient;
    void* out_weights;
    int16_t* out_low;
    float* out_m;
    float* out_v;
    const int64_t* ranges;  // start, end, start, end, ...: ascending, disjoint
    int64_t range_count;
    int64_t elements;
    int32_t gradient_is_bf16;
    int32_t vectors;       // what torch uses on this processor: 0 no fused multiply-add, 1 AVX2, 2 AVX-512
    int32_t roots;         // 0 the nearest, 1 by Newton's method where the processor has AVX-512, 2 as `roots_of_torch` takes them
    int32_t streams;       // all of out is elsewhere than the state, and begins on cache lines
    int32_t part;          // 0 all of the state changes, 1 masters alone, 2 moments alone
    int32_t threads;
    float scale;        // of the gradient; negative to maximize
    float decay;        // AdamW: 1 - lr * weight_decay
    float l2;           // Adam: weight_decay
    float lerp_weight;  // 1 - beta1
    float beta2;
    float square_weight;  // 1 - beta2
    float root_correction;
    float eps;
    float negative_step_size;
};

namespace {

#if defined(__x86_64__)
const struct Processor {
    bool has_avx2, has_avx512;
    Processor() {
        __builtin_cpu_init();
        has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
} PROCESSOR;
#endif

template <bool fused>
INLINE float multiply_add(float a, float b, float c) {
    return fused ? __builtin_fmaf(a, b, c) : a * b + c;
}

INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Square roots as MKL takes them on Intel's AVX-512, and torch with it: one step of Newton's method from a 14-bit estimate. 0.6 % of
// them are one ulp below the nearest float. Small numbers are scaled, so that no remainder is lost below the smallest float.
#if defined(__x86_64__)
__attribute__((target("avx512f"))) void newton_roots(const float* squares, float* found, int64_t count) {
    const __m512 small = _mm512_set1_ps(0x1p-60f), infinity = _mm512_set1_ps(INFINITY);
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 there = count - i >= 16 ? 0xFFFF : __mmask16((1u << (count - i)) - 1);
        const __m512 given = _mm512_maskz_loadu_ps(there, squares + i);
        const __mmask16 is_small = _mm512_cmp_ps_mask(given, small, _CMP_LT_OQ);
        const __mmask16 is_its_root = _mm512_cmp_ps_mask(given, _mm512_setzero_ps(), _CMP_EQ_OQ) |
                                      _mm512_cmp_ps_mask(given, infinity, _CMP_EQ_OQ);
        const __m512 x = _mm512_mask_mul_ps(given, is_small, given, _mm512_set1_ps(0x1p96f));
        const __m512 inverse = _mm512_maskz_rsqrt14_ps(there, x);
        const __m512 estimate = _mm512_mul_ps(x, inverse);
        const __m512 remainder = _mm512_fnmadd_ps(estimate, estimate, x);
        __m512 root = _mm512_fmadd_ps(remainder, _mm512_mul_ps(inverse, _mm512_set1_ps(0.5f)), estimate);
        root = _mm512_mask_mul_ps(root, is_small, root, _mm512_set1_ps(0x1p-48f));
        _mm512_mask_storeu_ps(found + i, there, _mm512_mask_mov_ps(root, is_its_root, given));
    }
}
#endif

// A hint, which may go beyond the array.
INLINE void ask_for(const void* address, int64_t bytes) {
    for (int64_t each = 0; each < bytes; each += 64) __builtin_prefetch(static_cast<const char*>(address) + each);
}

// Past the caches: memory that is written whole need not be read first, which saves a third of the traffic out of place.
INLINE void stream(void* out, const void* in, int64_t bytes) {
#if defined(__x86_64__)
    auto* to = static_cast<__m128i*>(out);
    auto* from = static_cast<const __m128i*>(in);
    for (int64_t each = 0; each < bytes / 16; each++) _mm_stream_si128(to + each, _mm_load_si128(from + each));
#else
    std::memcpy(out, in, bytes);
#endif
}

// MKL's own, which has other ways on other processors: on AMD's, a fifth of the roots are one ulp beside the nearest float.
void (*roots_of_torch)(int64_t count, const float* squares, float* found, int64_t mode) = nullptr;
constexpr int64_t MKL_MODE = 0x2 | 0x140000 | 0x100;  // accurate, small numbers as they are, errors ignored: as torch asks for them

INLINE void roots_of(const Update& u, const float* squares, float* found, int64_t count) {
#if defined(__x86_64__)
    if (u.roots == 1 && PROCESSOR.has_avx512) return newton_roots(squares, found, count);
#endif
    if (u.roots == 2) return roots_of_torch(count, squares, found, MKL_MODE);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) found[i] = std::sqrt(squares[i]);
}

INLINE void load_gradients(const Update& u, int64_t from, int64_t count, float* g) {
    if (u.gradient_is_bf16) {
        const auto* gradients = static_cast<const uint16_t*>(u.gradient) + from;
        ask_for(gradients + AHEAD, BLOCK * sizeof *gradients);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) g[i] = as_float(uint32_t(gradients[i]) << 16) * u.scale;
    } else {
        const auto* gradients = static_cast<const float*>(u.gradient) + from;
        ask_for(gradients + AHEAD, BLOCK * sizeof *gradients);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) g[i] = gradients[i] * u.scale;
    }
}

// The rule of split.py: bits = (high << 16) + low, high = (bits + 0x8000) >> 16.
INLINE void load_masters(const Update& u, int64_t from, int64_t count, float* masters) {
    if (u.low) {
        const auto* high = static_cast<const uint16_t*>(u.weights) + from;
        const auto* low = u.low + from;
        ask_for(high + AHEAD, BLOCK * sizeof *high);
        ask_for(low + AHEAD, BLOCK * sizeof *low);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) masters[i] = as_float((uint32_t(high[i]) << 16) + uint32_t(int32_t(low[i])));
    } else {
        const auto* weights = static_cast<const float*>(u.weights) + from;
        ask_for(weights + AHEAD, BLOCK * sizeof *weights);
        std::memcpy(masters, weights, count * sizeof *weights);
    }
}

INLINE void split_masters(const float* masters, int64_t count, uint16_t* high, int16_t* low) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = as_bits(masters[i]);
        high[i] = uint16_t((bits + 0x8000u) >> 16);
        low[i] = int16_t(uint16_t(bits));
    }
}

// Output may be the input itself: no element depends on another, but no pointer is `restrict` either.
template <bool fused>
INLINE void update_block(const Update& u, int64_t from, int64_t count, bool streams) {
    alignas(64) float g[BLOCK], masters[BLOCK], roots[BLOCK], new_m[BLOCK], new_v[BLOCK];
    const float *m = u.m + from, *v = u.v + from;
    const bool keeps_moments = u.part != 1, keeps_masters = u.part != 2;
    const bool elsewhere = streams || !keeps_moments;
    float *out_m = elsewhere ? new_m : u.out_m + from, *out_v = elsewhere ? new_v : u.out_v + from;
    load_gradients(u, from, count, g);
    if (keeps_masters) load_masters(u, from, count, masters);
    ask_for(m + AHEAD, BLOCK * sizeof *m);
    ask_for(v + AHEAD, BLOCK * sizeof *v);
    if (u.l2 != 0) {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) g[i] = multiply_add<fused>(masters[i], u.l2, g[i]);
    }
    const bool leans_on_old = u.lerp_weight < 0.5f;
    const float coefficient = leans_on_old ? u.lerp_weight : u.lerp_weight - 1.0f;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float old_m = m[i];
        out_m[i] = multiply_add<fused>(coefficient, g[i] - old_m, leans_on_old ? old_m : g[i]);
        out_v[i] = multiply_add<fused>(u.square_weight * g[i], g[i], v[i] * u.beta2);
    }
    if (streams && keeps_moments) {
        stream(u.out_m + from, new_m, sizeof new_m);
        stream(u.out_v + from, new_v, sizeof new_v);
    }
    if (!keeps_masters) return;
    roots_of(u, out_v, roots, count);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float denominator = roots[i] / u.root_correction + u.eps;
        masters[i] = masters[i] * u.decay + (u.negative_step_size * out_m[i]) / denominator;
    }
    if (streams) {
        if (u.low) {
            alignas(64) uint16_t high[BLOCK];
            alignas(64) int16_t low[BLOCK];
            split_masters(masters, BLOCK, high, low);
            stream(static_cast<uint16_t*>(u.out_weights) + from, high, sizeof high);
            stream(u.out_low + from, low, sizeof low);
        } else {
            stream(static_cast<float*>(u.out_weights) + from, masters, sizeof masters);
        }
    } else if (u.low) {
        split_masters(masters, count, static_cast<uint16_t*>(u.out_weights) + from, u.out_low + from);
    } else {
        std::memcpy(static_cast<float*>(u.out_weights) + from, masters, count * sizeof *masters);
    }
}

// Whole blocks begin at multiples of BLOCK, where cache lines begin; what is over at both ends is done by itself.
template <bool fused>
INLINE void update_range(const Update& u, int64_t from, int64_t to) {
    for (int64_t next; from < to; from = next) {
        next = std::min((from / BLOCK + 1) * BLOCK, to);
        if (next - from == BLOCK) update_block<fused>(u, from, BLOCK, u.streams);
        else update_block<fused>(u, from, next - from, false);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
void update_avx512(const Update& u, int64_t from, int64_t to) { update_range<true>(u, from, to); }

__attribute__((target("avx2,fma")))
void update_avx2(const Update& u, int64_t from, int64_t to) { update_range<true>(u, from, to); }

constexpr bool BASELINE_IS_FUSED = false;
#else
constexpr bool BASELINE_IS_FUSED = true;
#endif

void update_baseline(const Update& u, int64_t from, int64_t to) { update_range<BASELINE_IS_FUSED>(u, from, to); }

void update_best(const Update& u, int64_t from, int64_t to) {
#if defined(__x86_64__)
    if (u.vectors >= 2 && PROCESSOR.has_avx512) return update_avx512(u, from, to);
    if (u.vectors >= 1 && PROCESSOR.has_avx2) return update_avx2(u, from, to);
#endif
    update_baseline(u, from, to);
}

void copy_over(const Update& u, int64_t from, int64_t to) {
    if (from >= to) return;
    auto copy = [=](void* out, const void* in, size_t size) {
        if (out == in) return;
        std::memcpy(static_cast<char*>(out) + from * size, static_cast<const char*>(in) + from * size, (to - from) * size);
    };
    if (u.part != 2) {
        copy(u.out_weights, u.weights, u.low ? 2 : 4);
        if (u.low) copy(u.out_low, u.low, 2);
    }
    if (u.part != 1) {
        copy(u.out_m, u.m, 4);
        copy(u.out_v, u.v, 4);
    }
}

// All of [from, to): the ranges are updated, what lies between them stays as it is.
void do_stretch(const Update& u, int64_t from, int64_t to) {
    for (int64_t each = 0; each < u.range_count; each++) {
        const int64_t start = std::max(u.ranges[2 * each], from), end = std::min(u.ranges[2 * each + 1], to);
        if (start >= end) continue;
        copy_over(u, from, start);
        update_best(u, start, end);
        from = end;
    }
    copy_over(u, from, to);
#if defined(__x86_64__)
    _mm_sfence();  // streamed stores are in order with what follows
#endif
}

// ---------------------------------------------------------------------- threads

// The processors that are near one part of memory. Of a single node they are not named.
struct Node {
    std::vector<int32_t> processors;
    int64_t cores;
};

const std::vector<Node> ANYWHERE{{{}, 1}};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One pass over a chunk on its threads. A thread takes what it can of its own stretch of it, whose memory stays near it, and then
// of the others', those of its node first: nobody waits for one that the system has taken off its core. Late ones find nothing
// left, and only this.
struct Work {
    struct alignas(64) Stretch {
        Stretch(size_t node, int64_t from, int64_t to, bool owned) : node(node), is_owned(owned), next(from), end(to) {}
        const size_t node;
        const bool is_owned;  // by a thread that begins with it. A node that has no thread leaves its stretch to the others
        std::atomic<int64_t> next;
        const int64_t end;
    };

    // Nodes have elements and threads in proportion to their cores. The elements do not depend on how many threads there are: a
    // node has the memory that pages.py touched for it.
    Work(std::function<void(int64_t, int64_t)> asked, int64_t elements, int64_t threads, const std::vector<Node>& nodes)
        : pass(std::move(asked)), left(elements), is_over(elements == 0) {
        std::fegetenv(&environment);
        int64_t cores = 0, cores_so_far = 0, from = 0, threads_so_far = 0;
        for (const Node& node : nodes) cores += node.cores;
        for (size_t node = 0; node < nodes.size(); node++) {
            cores_so_far += nodes[node].cores;
            const int64_t owned = threads * cores_so_far / cores - threads_so_far, count = std::max<int64_t>(1, owned);
            const int64_t end = cores_so_far == cores ? elements : elements * cores_so_far / cores / GROUP * GROUP;
            int64_t size = (end - from + count - 1) / count;
            size = (size + GROUP - 1) / GROUP * GROUP;
            for (int64_t each = 0; each < count; each++)
                stretches.emplace_back(node, std::min(from + each * size, end), std::min(from + (each + 1) * size, end),
                                       each < owned);
            threads_so_far += owned;
            from = end;
        }
    }

    void help(size_t own) {
        if (!is_begun.exchange(true)) seconds[0] = now();
        int64_t done = 0;
        for (const bool at_home : {true, false}) {
            for (size_t each = 0; each < stretches.size(); each++) {
                Stretch& stretch = stretches[(own + each) % stretches.size()];
                if ((stretch.node == stretches[own].node) != at_home) continue;
                for (int64_t from; (from = stretch.next.fetch_add(GRAIN)) < stretch.end;) {
                    const int64_t to = std::min(from + GRAIN, stretch.end);
                    pass(from, to);
                    done += to - from;
                }
            }
        }
        if (!done || left.fetch_sub(done) != done) return;
        std::lock_guard<std::mutex> lock(mutex);
        seconds[1] = now();
        is_over = true;
        all_done.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        all_done.wait(lock, [this] { return is_over; });
    }

    const std::function<void(int64_t, int64_t)> pass;  // over the elements from one to another
    fenv_t environment;  // the caller's treatment of denormals
    std::atomic<int64_t> left;  // elements
    std::atomic<bool> is_begun{false};
    bool is_over;
    double seconds[2]{};  // when it began and ended
    std::deque<Stretch> stretches;
    std::mutex mutex;
    std::condition_variable all_done;
};

struct Task {
    std::shared_ptr<Work> work;
    size_t own;
};

// Leaves the calling thread where it was if none of these is allowed any more: memory is then further away, and that is all.
void bind_to(const std::vector<int32_t>& processors) {
#if defined(__linux__)
    if (processors.empty()) return;
    const int count = *std::max_element(processors.begin(), processors.end()) + 1;
    cpu_set_t* const set = CPU_ALLOC(count);
    if (!set) return;
    CPU_ZERO_S(CPU_ALLOC_SIZE(count), set);
    for (const int32_t each : processors) CPU_SET_S(each, CPU_ALLOC_SIZE(count), set);
    pthread_setaffinity_np(pthread_self(), CPU_ALLOC_SIZE(count), set);
    CPU_FREE(set);
#endif
}

// A worker has its own queue: the n-th stretch of a node is always begun by the node's n-th worker. It runs on any of the node's
// cores, not on one of its own, which somebody else might be using.
class Worker {
public:
    explicit Worker(const std::vector<int32_t>& processors) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // inherited: signals go to the program's own threads
        try {
            std::thread([this, processors] {
                bind_to(processors);
                work();
            }).detach();
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void take(const Task& task) {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(task);
        arrived_.notify_one();
    }

private:
    [[noreturn]] void work() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            arrived_.wait(lock, [this] { return !tasks_.empty(); });
            const Task task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            std::fesetenv(&task.work->environment);
            task.work->help(task.own);
        }
    }

    std::mutex mutex_;
    std::condition_variable arrived_;
    std::deque<Task> tasks_;
};

struct Pool {
    explicit Pool(std::vector<Node> known) : nodes(std::move(known)), workers_(nodes.size()) {}

    const std::vector<Node> nodes;

    Worker* worker(size_t node, size_t index) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Worker*>& there = workers_[node];
        while (there.size() <= index) there.push_back(new Worker(nodes[node].processors));
        return there[index];
    }

private:
    std::mutex mutex_;
    std::vector<std::vector<Worker*>> workers_;  // by node
};

// Never destroyed: its threads outlive static destructors. A forked child has none of them, and begins anew.
Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool(pool->nodes); });
    return new Pool(ANYWHERE);
}();

// Workers come to it after what they were given before; the calling thread is the first of them if it `joins`.
std::shared_ptr<Work> begin(const std::function<void(int64_t, int64_t)>& pass, int64_t elements, int32_t wanted, bool joins) {
    const int64_t useful = std::max<int64_t>(1, elements / WORTH_A_THREAD);
    const int64_t threads = std::min<int64_t>(wanted, useful);
    const std::vector<Node>& nodes = threads == 1 ? ANYWHERE : pool->nodes;
    const auto work = std::make_shared<Work>(pass, elements, threads, nodes);
    // On several nodes it leaves its share to a worker, and waits: it is the program's, and not ours to be bound.
    bool helps = joins && nodes.size() == 1;
    try {
        std::vector<size_t> busy(nodes.size());  // workers, by node
        for (size_t each = helps; each < work->stretches.size(); each++) {
            const Work::Stretch& stretch = work->stretches[each];
            if (stretch.is_owned) pool->worker(stretch.node, busy[stretch.node]++)->take({work, each});
        }
    } catch (...) {  // no more threads or memory to be had: fewer do it
        helps = true;
    }
    if (helps) work->help(0);
    return work;
}

// ---------------------------------------------------------------------- sums of gradients, and of squares

template <class Value>
INLINE double squares_of(const Value& value, int64_t from, int64_t to) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = from; i < to; i++) sum += double(value(i)) * double(value(i));
    return sum;
}

// Each GROUP has the sum of its squares from one thread, whichever that is, so that their sum is the same for any number of them.
struct Sum {
    float* total;
    const void* part;  // bf16 or fp32: added to the total, or in its place if it is the first
    bool is_bf16, is_first;
    double* squares;  // of each group of the total, or of the part where there is none

    INLINE void range(int64_t from, int64_t to) const {
        const auto half = [in = static_cast<const uint16_t*>(part)](int64_t i) { return as_float(uint32_t(in[i]) << 16); };
        const auto whole = [in = static_cast<const float*>(part)](int64_t i) { return in[i]; };
        for (int64_t next; from < to; from = next) {
            next = std::min(from + GROUP, to);
            squares[from / GROUP] = is_bf16 ? group(half, from, next) : group(whole, from, next);
        }
    }

    // Squares are taken of what is still in the nearest cache.
    template <class Value>
    INLINE double group(const Value& value, int64_t from, int64_t to) const {
        if (!total) return squares_of(value, from, to);
        float* const out = total;
        if (is_first) {
#pragma omp simd
            for (int64_t i = from; i < to; i++) out[i] = value(i);
        } else {
#pragma omp simd
            for (int64_t i = from; i < to; i++) out[i] += value(i);
        }
        return squares_of([out](int64_t i) { return out[i]; }, from, to);
    }
};

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
void add_avx512(const Sum& s, int64_t from, int64_t to) { s.range(from, to); }

__attribute__((target("avx2,fma")))
void add_avx2(const Sum& s, int64_t from, int64_t to) { s.range(from, to); }
#endif

void add_best(const Sum& s, int64_t from, int64_t to) {
#if defined(__x86_64__)
    if (PROCESSOR.has_avx512) return add_avx512(s, from, to);
    if (PROCESSOR.has_avx2) return add_avx2(s, from, to);
#endif
    s.range(from, to);
}

}  // namespace

extern "C" void anyfit_adamw(const Update* update) {
    const Update u = *update;
    begin([u](int64_t from, int64_t to) { do_stretch(u, from, to); }, u.elements, u.threads, true)->wait();
}

// The same, and nobody waits. What the update points to is there until it is over.
extern "C" void* anyfit_adamw_begin(const Update* update) {
    const Update u = *update;
    const auto pass = [u](int64_t from, int64_t to) { do_stretch(u, from, to); };
    return new std::shared_ptr<Work>(begin(pass, u.elements, u.threads, false));
}

extern "C" int32_t anyfit_is_over(const std::shared_ptr<Work>* work) {
    std::lock_guard<std::mutex> lock((*work)->mutex);
    return (*work)->is_over;
}

// Waits; tells when it began and when it ended, by the steady clock.
extern "C" void anyfit_wait(const std::shared_ptr<Work>* work, double* seconds) {
    (*work)->wait();
    std::copy_n((*work)->seconds, 2, seconds);
}

extern "C" void anyfit_forget(const std::shared_ptr<Work>* work) { delete work; }

// total = part, or total += part, element by element; the sum of the squares that it then has. Without a total, those of the part.
extern "C" double anyfit_add(float* total, const void* part, int32_t is_bf16, int32_t is_first, int64_t elements, int32_t threads) {
    std::vector<double> squares((elements + GROUP - 1) / GROUP);
    const Sum s{total, part, is_bf16 != 0, is_first != 0, squares.data()};
    begin([s](int64_t from, int64_t to) { add_best(s, from, to); }, elements, threads, true)->wait();
    return std::accumulate(squares.begin(), squares.end(), 0.0);
}

// How torch takes square roots, where it can be asked: vmsSqrt_64 of MKL.
extern "C" void anyfit_use_roots(void (*known)(int64_t, const float*, float*, int64_t)) { roots_of_torch = known; }

// The processors of each node, one node after another. Said before anything is updated; nothing may be under way.
extern "C" void anyfit_use_nodes(const int32_t* processors, const int32_t* counts, int32_t nodes) {
    std::vector<Node> known;
    for (int32_t each = 0; each < nodes; processors += counts[each++])
        known.push_back({{processors, processors + counts[each]}, counts[each]});
    pool = new Pool(nodes == 1 ? ANYWHERE : known);
}

// What checkpoints and first weights do with bytes: add them up (CRC-32, as zlib does), put exact numbers together from their
// halves, and take them apart.
// Plain C++ and a C interface. What is to wait for others has a thread of its own: one that also runs Python would, whenever it
// has to give way, keep Python's lock from those that it gives way to.
//
// CRC-32 by folding (V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ, Intel 2009): the message is a
// polynomial over GF(2); 64 bytes of it are multiplied by x^512 modulo the CRC's and added to the next 64, until few are left.
// Where the processor multiplies four times as much at once, 256 bytes are multiplied by x^2048, and their sum is the rest.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // its bits reversed, as everything here
constexpr int64_t LINE = 64;                 // bytes

#if defined(__x86_64__)
const struct Processor {
    bool folds, folds_widely, has_avx2;
    Processor() {
        __builtin_cpu_init();
        folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
        folds_widely = folds && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
        has_avx2 = __builtin_cpu_supports("avx2");
    }
} PROCESSOR;

#define FOLDING __attribute__((target("pclmul,sse4.1")))

// Multiplies 128 bits by the powers of x that `keys` stand for, and adds the next 128.
FOLDING INLINE __m128i fold(__m128i sum, __m128i keys, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(sum, keys, 0x00), high = _mm_clmulepi64_si128(sum, keys, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FOLDING INLINE __m128i at(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// Of a whole number of 16 bytes, at least 64.
FOLDING uint32_t folded(uint32_t crc, const uint8_t* data, int64_t count) {
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124), barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i words = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i a = _mm_xor_si128(at(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = at(data + 16), c = at(data + 32), d = at(data + 48);
    for (data += 64, count -= 64; count >= 64; data += 64, count -= 64) {
        _mm_prefetch(reinterpret_cast<const char*>(data + 1024), _MM_HINT_T0);
        a = fold(a, by_64, at(data));
        b = fold(b, by_64, at(data + 16));
        c = fold(c, by_64, at(data + 32));
        d = fold(d, by_64, at(data + 48));
    }
    a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
    for (; count >= 16; data += 16, count -= 16) a = fold(a, by_16, at(data));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, words), by_8, 0x00));
    const __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, words), barrett, 0x10), words);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(quotient, barrett, 0x00));
    return static_cast<uint32_t>(_mm_extract_epi32(a, 1));
}

#define FOLDING_WIDELY __attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq")))

FOLDING_WIDELY INLINE __m512i fold_widely(__m512i sum, __m512i keys, const uint8_t* next) {
    const __m512i low = _mm512_clmulepi64_epi128(sum, keys, 0x00), high = _mm512_clmulepi64_epi128(sum, keys, 0x11);
    return _mm512_ternarylogic_epi64(low, high, _mm512_loadu_si512(next), 0x96);  // the sum of all three
}

// Of a whole number of 256 bytes.
FOLDING_WIDELY uint32_t folded_widely(uint32_t crc, const uint8_t* data, int64_t count) {
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i first = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc)));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), first), b = _mm512_loadu_si512(data + 64);
    __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    for (data += 256, count -= 256; count > 0; data += 256, count -= 256) {
        _mm_prefetch(reinterpret_cast<const char*>(data + 2048), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(data + 2112), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(data + 2176), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(data + 2240), _MM_HINT_T0);
        a = fold_widely(a, by_256, data);
        b = fold_widely(b, by_256, data + 64);
        c = fold_widely(c, by_256, data + 128);
        d = fold_widely(d, by_256, data + 192);
    }
    uint8_t rest[256];
    _mm512_storeu_si512(rest, a);
    _mm512_storeu_si512(rest + 64, b);
    _mm512_storeu_si512(rest + 128, c);
    _mm512_storeu_si512(rest + 192, d);
    return folded(0, rest, sizeof rest);
}
#endif

const std::array<uint32_t, 256> TABLE = [] {
    std::array<uint32_t, 256> found{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) rest = rest & 1 ? rest >> 1 ^ POLYNOMIAL : rest >> 1;
        found[byte] = rest;
    }
    return found;
}();

INLINE void merge_one(const uint16_t* high, const int16_t* low, uint32_t* out, int64_t i) {
    out[i] = (static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(low[i]));
}

INLINE void merge_plainly(const uint16_t* high, const int16_t* low, uint32_t* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) merge_one(high, low, out, i);
}

INLINE void split_plainly(const uint32_t* exact, uint16_t* high, int16_t* low, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        low[i] = static_cast<int16_t>(exact[i]);
        high[i] = static_cast<uint16_t>((exact[i] + 0x8000) >> 16);
    }
}

// How many bytes lie before the next cache line, at most `count`.
INLINE int64_t before_line(const void* address, int64_t count) {
    const int64_t before = -reinterpret_cast<intptr_t>(address) & (LINE - 1);
    return before < count ? before : count;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void merge_in_vectors(const uint16_t* high, const int16_t* low, uint32_t* out, int64_t count) {
    merge_plainly(high, low, out, count);  // which the compiler makes vectors of
}

__attribute__((target("avx2"))) void split_in_vectors(const uint32_t* exact, uint16_t* high, int16_t* low, int64_t count) {
    split_plainly(exact, high, low, count);
}

// Past the cache, for what is not read again soon: memory is then written without being read before.
__attribute__((target("avx2"))) void merge_past(const uint16_t* high, const int16_t* low, uint32_t* out, int64_t count) {
    int64_t i = 0;
    for (const int64_t before = before_line(out, 4 * count) / 4; i < before; ++i) merge_one(high, low, out, i);
    for (; i + 16 <= count; i += 16) {
        for (int64_t half = i; half < i + 16; half += 8) {
            const __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high + half)));
            const __m256i l = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low + half)));
            _mm256_stream_si256(reinterpret_cast<__m256i*>(out + half), _mm256_add_epi32(_mm256_slli_epi32(h, 16), l));
        }
    }
    for (; i < count; ++i) merge_one(high, low, out, i);
    _mm_sfence();
}

__attribute__((target("avx2"))) void copy_past(const uint8_t* from, uint8_t* to, int64_t count) {
    int64_t i = before_line(to, count);
    std::memcpy(to, from, static_cast<size_t>(i));
    for (; i + LINE <= count; i += LINE) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), first);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), second);
    }
    std::memcpy(to + i, from + i, static_cast<size_t>(count - i));
    _mm_sfence();
}
#endif

}  // namespace

// Whether adding up is quicker here than zlib.
extern "C" int32_t anyfit_folds() {
#if defined(__x86_64__)
    return PROCESSOR.folds;
#else
    return 0;
#endif
}

extern "C" uint32_t anyfit_crc32(const uint8_t* data, int64_t count, uint32_t value) {
    uint32_t crc = ~value;
#if defined(__x86_64__)
    if (PROCESSOR.folds_widely && count >= 1024) {
        const int64_t whole = count & ~int64_t{255};
        crc = folded_widely(crc, data, whole);
        data += whole;
        count -= whole;
    }
    if (PROCESSOR.folds && count >= 64) {
        const int64_t whole = count & ~int64_t{15};
        crc = folded(crc, data, whole);
        data += whole;
        count -= whole;
    }
#endif
    for (; count > 0; ++data, --count) crc = crc >> 8 ^ TABLE[(crc ^ *data) & 255];
    return ~crc;
}

namespace {

// out[i] = (high[i] << 16) + low[i]; none of them overlap.
void merge(const uint16_t* high, const int16_t* low, uint32_t* out, int64_t count, int32_t past) {
#if defined(__x86_64__)
    if (PROCESSOR.has_avx2) return past ? merge_past(high, low, out, count) : merge_in_vectors(high, low, out, count);
#endif
    merge_plainly(high, low, out, count);
}

void copy(const uint8_t* from, uint8_t* to, int64_t count, int32_t past) {
#if defined(__x86_64__)
    if (PROCESSOR.has_avx2 && past) return copy_past(from, to, count);
#endif
    std::memcpy(to, from, static_cast<size_t>(count));
}

// Of this thread alone, where a thread has a priority of its own; as good as it goes.
void give_way([[maybe_unused]] int32_t nice) {
#if defined(__linux__)
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice);
#endif
}

template <typename Work>
void apart(int32_t nice, Work work) {
    if (nice <= 0) return work();
    try {
        std::thread([&] {
            give_way(nice);
            work();
        }).join();
    } catch (const std::system_error&) {  // no thread is to be had
        work();
    }
}

}  // namespace

struct Move {
    const void* from;  // or the high halves
    const int16_t* low;  // nullptr where there are none
    void* to;
    int64_t count;  // of numbers that have halves, else of bytes
};

// One after another; `nice` is how much others come first.
extern "C" void anyfit_move_all(const Move* moves, int64_t count, int32_t past, int32_t nice) {
    apart(nice, [=] {
        for (const Move* each = moves; each < moves + count; ++each) {
            if (each->low) {
                merge(static_cast<const uint16_t*>(each->from), each->low, static_cast<uint32_t*>(each->to), each->count, past);
            } else {
                copy(static_cast<const uint8_t*>(each->from), static_cast<uint8_t*>(each->to), each->count, past);
            }
        }
    });
}

// exact[i] = (high[i] << 16) + low[i]; none of them overlap.
extern "C" void anyfit_split(const uint32_t* exact, uint16_t* high, int16_t* low, int64_t count) {
#if defined(__x86_64__)
    if (PROCESSOR.has_avx2) return split_in_vectors(exact, high, low, count);
#endif
    split_plainly(exact, high, low, count);
}

// Has the kernel give memory to these bytes, which begin at a page's, so many at a time; until `*ends` is not 0. Whether it can.
extern "C" int32_t anyfit_populate(uint8_t* memory, int64_t count, int64_t at_once, int32_t nice, const volatile int32_t* ends) {
    int32_t populated = 0;
#if defined(__linux__)
    constexpr int POPULATE_WRITE = 23;  // Linux 5.14
    apart(nice, [&] {
        populated = 1;
        for (int64_t at = 0; at < count && populated && !*ends; at += at_once) {
            const int64_t size = count - at < at_once ? count - at : at_once;
            populated = !madvise(memory + at, static_cast<size_t>(size), POPULATE_WRITE);
        }
    });
#endif
    return populated;
}

// Writes to each page of these bytes, and changes none of them: others may write there meanwhile. Until `*ends` is not 0. Unlike
// `anyfit_populate` it keeps nobody else in this process from getting memory.
extern "C" void anyfit_touch(uint8_t* memory, int64_t count, int64_t page, const volatile int32_t* ends) {
    for (int64_t at = 0; at < count && !*ends; at += page) {
        uint8_t none = 0;
        __atomic_compare_exchange_n(memory + at, &none, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}

// The asynchronous copies of one thread: issued, committed in groups, landed at a wait.
//
// Hardware may write the destination at any time between the issue and the wait. Here it holds poison until the wait and
// the data after it, so both mistakes show: reading before the wait, and refilling what others still read.
#pragma once
#include <cstring>
#include <vector>

#include "../include/types.cuh"
#include "runtime.hpp"

namespace vk::host {

struct Copy {
    void* dst;
    const void* src;  // null: zeros
    Site site;
    void land() const {
        if (src) std::memcpy(dst, src, 16);
        else std::memset(dst, 0, 16);
    }
};

class Copies {
   public:
    void issue(const Copy& copy) { flying_.push_back(copy); }
    void commit() { group_ends_.push_back(flying_.size()); }

    // Lands every committed group but the `newest` ones.
    void wait(u64 newest) {
        if (group_ends_.size() <= newest) return;
        const auto groups = long(group_ends_.size() - newest), landed = long(group_ends_[std::size_t(groups - 1)]);
        for (long i = 0; i < landed; ++i) flying_[std::size_t(i)].land();
        flying_.erase(flying_.begin(), flying_.begin() + landed);
        group_ends_.erase(group_ends_.begin(), group_ends_.begin() + groups);
        for (u64& end : group_ends_) end -= u64(landed);
    }

    std::size_t pending() const { return flying_.size(); }
    Site oldest() const { return flying_.front().site; }
    void clear() {
        flying_.clear();
        group_ends_.clear();
    }

   private:
    std::vector<Copy> flying_;     // oldest first
    std::vector<u64> group_ends_;  // how many of `flying_` each committed group and those before it hold
};

}  // namespace vk::host

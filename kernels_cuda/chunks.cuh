// The table of chunks that every kernel reads: built by layout.cu from dense rows or packed sequences alike.
#pragma once
#include "vk.cuh"

namespace vk {

// chunks [upper bound]; a sequence's chunks are neighbours. first_chunk [N+1]: number of chunks before each sequence.
struct Chunk {
    i64 token;     // first token, counted over all rows of the batch
    i32 rows;      // 1..C tokens; 0: this entry lies past the last chunk
    i32 sequence;  // -1 past the last chunk
};

}  // namespace vk

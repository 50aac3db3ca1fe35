// Posts and completes UCX tag messages in batches: what one turn of a transfer thread does, in one call.

#include "mapped.h"
#include "mover.h"

namespace {

// As much as there is room for. Returns how much that was.
uint64_t show(std::vector<Message> &hidden, Batch &batch) {
    const uint64_t count = std::min<uint64_t>(hidden.size(), kRoom - batch.count);
    for (uint64_t i = 0; i < count; ++i) batch.add(hidden[i]);
    hidden.erase(hidden.begin(), hidden.begin() + count);
    return count;
}

}  // namespace

extern "C" {

// The board is the caller's, and outlives the mover. digest and secret are xxhash's, or null if nobody wants digests.
void *pdserve_mover_open(void *worker, void *memory, uint64_t size, void *board, void *digest, void *secret) {
    const Xxhash xxhash{reinterpret_cast<decltype(Xxhash::digest)>(digest), reinterpret_cast<decltype(Xxhash::secret)>(secret)};
    return new Mover(*static_cast<Board *>(board), static_cast<ucp_worker_h>(worker), static_cast<char *>(memory), size,
                     xxhash);
}

// When nothing is in flight, or the worker is gone. The other functions do nothing with the null that is left.
void pdserve_mover_free(void *handle) { delete static_cast<Mover *>(handle); }

// Others may map the memory, until the link is withdrawn; the head before it has the cell.
void pdserve_mover_offer(void *handle, uint64_t cell, uint64_t nonce) {
    Mover &mover = *static_cast<Mover *>(handle);
    mover.cell = reinterpret_cast<uint64_t *>(mover.memory - kHead) + cell;
    mover.nonce = nonce;
    __atomic_store_n(mover.cell, nonce, __ATOMIC_RELEASE);
}

// Before endpoints are closed. Nothing that is read of the memory from now on counts, and nothing is copied any more.
void pdserve_mover_withdraw(void *handle) {
    if (handle == nullptr) return;
    Mover &mover = *static_cast<Mover *>(handle);
    mover.noticed.clear();
    mover.copies.clear();
    if (mover.cell == nullptr) return;
    __atomic_store_n(mover.cell, 0, __ATOMIC_RELAXED);
    // Before anything that the memory is given to next is written there.
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

// The next endpoint, in the order of the others' numbers; link is of its address.
void pdserve_mover_meet(void *handle, void *endpoint, uint64_t link) {
    if (handle == nullptr) return;
    Mover &mover = *static_cast<Mover *>(handle);
    mover.targets.push_back({static_cast<ucp_ep_h>(endpoint), link, false, 0, 0, {}});
    match(mover);
}

// Maps a memory that the other side of the endpoint offers, and tells it so. Nonzero if it cannot be mapped, or is not
// offered any more; own is the link of this side's address.
int pdserve_mover_attach(void *handle, void *endpoint, uint64_t own, int file, uint64_t size, uint64_t cell,
                         uint64_t nonce) {
    if (handle == nullptr || cell >= kCells) return -1;
    Mover &mover = *static_cast<Mover *>(handle);
    void *mapping = mmap(nullptr, kHead + size, PROT_READ, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) return -1;
    const Source source{static_cast<ucp_ep_h>(endpoint), static_cast<char *>(mapping), size, cell, nonce, 0, 0, 0};
    if (!source.stands()) {
        munmap(mapping, kHead + size);
        return -1;
    }
    mover.sources.push_back(source);
    ++mover.board.attached;
    const Attached told{own, mover.sources.size() - 1};
    send_control(mover, source.endpoint, {Kind::kAttached, nonce, 0}, &told, sizeof told);
    return 0;
}

// Nonzero, and nothing is sent, if any of it is outside of the memory.
int pdserve_mover_send(void *handle, void *endpoint, uint64_t count, const uint64_t *places, uint64_t length,
                       const uint64_t *labels) {
    if (handle == nullptr) return 0;
    Mover &mover = *static_cast<Mover *>(handle);
    for (uint64_t i = 0; i < count; ++i)
        if (!mover.owns(places[i], length)) return -1;
    ucp_ep_h to = static_cast<ucp_ep_h>(endpoint);
    for (uint64_t number = 0; number < mover.targets.size(); ++number)
        if (mover.targets[number].endpoint == to && mover.targets[number].attached)
            return notify(mover, number, count, places, length, labels), 0;
    for (uint64_t i = 0; i < count && mover.board.status == UCS_OK; ++i) {
        Operation *operation = new Operation{&mover, {labels[i], places[i], length}, Report::kSent, nullptr};
        post_send(operation, to, mover.memory + places[i], length, labels[i]);
    }
    mover.count_hidden();
    return 0;
}

// The messages on the board, one place each. Nonzero, and nothing is received, if any of it is outside of the memory.
int pdserve_mover_receive(void *handle, const uint64_t *places) {
    if (handle == nullptr) return 0;
    Mover &mover = *static_cast<Mover *>(handle);
    Batch &arrived = mover.board.arrived;
    for (uint64_t i = 0; i < arrived.count; ++i)
        if (places[i] != kDiscard && !mover.owns(places[i], arrived.lengths[i])) return -1;
    for (uint64_t i = 0; i < arrived.count; ++i) {
        const Waiting &what = mover.shown[i];
        const Message message{what.message.label, places[i], what.message.length};
        if (what.handle == nullptr) {
            mover.copies.push_back({what.source, what.message.place, message});
            continue;
        }
        const bool wanted = places[i] != kDiscard;
        Operation *operation =
            new Operation{&mover, message, wanted ? Report::kLanded : Report::kNothing, nullptr};
        if (!wanted) operation->scratch.reset(new char[std::max<uint64_t>(message.length, 1)]);
        post_receive(operation, wanted ? mover.memory + message.place : operation->scratch.get(), message.length,
                     what.handle);
    }
    arrived.count = 0;
    mover.count_hidden();
    return 0;
}

// At most so many steps of the worker, and some copies; then the board shows what is over. Returns 0 if there is no news.
int pdserve_mover_progress(void *handle, int steps) {
    if (handle == nullptr) return 0;
    Mover &mover = *static_cast<Mover *>(handle);
    int done = 0;
    while (done < steps && ucp_worker_progress(mover.worker)) ++done;
    bool news = done > 0;
    news |= take_controls(mover);
    for (int round = 0; round < kCopyRounds && copy_some(mover); ++round) news = true;
    news |= show(mover.sent, mover.board.sent) + show(mover.landed, mover.board.landed) > 0;
    mover.count_hidden();
    return news;
}

// Puts the next messages that have arrived on the board; those before must have been received.
void pdserve_mover_look(void *handle) {
    if (handle == nullptr) return;
    Mover &mover = *static_cast<Mover *>(handle);
    Batch &arrived = mover.board.arrived;
    const auto add = [&](const Waiting &what) {
        mover.shown[arrived.count] = what;
        arrived.add(what.message);
    };
    ucp_tag_recv_info_t found;
    while (!arrived.full()) {
        ucp_tag_message_h handle = ucp_tag_probe_nb(mover.worker, 0, kControl, 1, &found);
        if (handle == nullptr) break;
        add({{found.sender_tag, 0, found.length}, handle, 0});
    }
    for (; !arrived.full() && !mover.noticed.empty(); mover.noticed.pop_front()) add(mover.noticed.front());
    mover.count_hidden();
}
}

// Posts and completes UCX tag messages in batches: one call does the work of a whole turn of a transfer thread.

#include "mapped.h"
#include "poster.h"

namespace {

// Moves as many messages to the batch as it has room for. Returns how many those were.
uint64_t show(std::vector<Message> &hidden, Batch &batch) {
    const uint64_t count = std::min<uint64_t>(hidden.size(), kRoom - batch.count);
    for (uint64_t i = 0; i < count; ++i) batch.add(hidden[i]);
    hidden.erase(hidden.begin(), hidden.begin() + count);
    return count;
}

}  // namespace

extern "C" {

// Makes a poster. The board belongs to the caller and outlives the poster. `digest` and `secret` are xxhash's
// functions, or null if no digests are wanted.
void *pdserve_poster_open(void *worker, void *memory, uint64_t size, void *board, void *digest, void *secret) {
    const Xxhash xxhash{reinterpret_cast<decltype(Xxhash::digest)>(digest),
                        reinterpret_cast<decltype(Xxhash::secret)>(secret)};
    return new Poster(*static_cast<Board *>(board), static_cast<ucp_worker_h>(worker), static_cast<char *>(memory),
                      size, xxhash);
}

// Registers the memory with all network devices of the worker's context, once for all messages. Without it, UCX registers
// the bytes of each message when they first move. Returns UCX's status.
int pdserve_poster_register(void *handle, void *context) {
    Poster &poster = *static_cast<Poster *>(handle);
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = poster.memory;
    params.length = poster.size;
    poster.context = static_cast<ucp_context_h>(context);
    const ucs_status_t status = ucp_mem_map(poster.context, &params, &poster.registered);
    if (status != UCS_OK) poster.registered = nullptr;
    return status;
}

// Frees the poster. Nothing may be in flight, or the worker must be gone. The other functions ignore a null handle,
// which is what the caller has afterwards.
void pdserve_poster_free(void *handle) { delete static_cast<Poster *>(handle); }

// Lets other processes map the memory until pdserve_poster_withdraw. The cell lies in the head before the memory.
void pdserve_poster_offer(void *handle, uint64_t cell, uint64_t nonce) {
    Poster &poster = *static_cast<Poster *>(handle);
    poster.cell = reinterpret_cast<uint64_t *>(poster.memory - kHead) + cell;
    poster.nonce = nonce;
    __atomic_store_n(poster.cell, nonce, __ATOMIC_RELEASE);
}

// Must be called before endpoints are closed. From then on no read of the memory counts, and nothing is copied.
void pdserve_poster_withdraw(void *handle) {
    if (handle == nullptr) return;
    Poster &poster = *static_cast<Poster *>(handle);
    poster.noticed.clear();
    poster.copies.clear();
    if (poster.cell == nullptr) return;
    __atomic_store_n(poster.cell, 0, __ATOMIC_RELAXED);
    // The cell must be empty before the memory's next user writes there.
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Adds the next endpoint. Endpoints come in the order of the other side's ranks; `link` is the number in the endpoint's
// address.
void pdserve_poster_add_endpoint(void *handle, void *endpoint, uint64_t link) {
    if (handle == nullptr) return;
    Poster &poster = *static_cast<Poster *>(handle);
    poster.targets.push_back({static_cast<ucp_ep_h>(endpoint), link, false, 0, 0, {}});
    mark_attached(poster);
}

// Maps the memory that the other side of the endpoint offers, and tells the other side. Returns nonzero if the memory
// cannot be mapped or is not offered any more. `own` is the link number in this side's address.
int pdserve_poster_attach(void *handle, void *endpoint, uint64_t own, int file, uint64_t size, uint64_t cell,
                          uint64_t nonce) {
    if (handle == nullptr || cell >= kCells) return -1;
    Poster &poster = *static_cast<Poster *>(handle);
    void *mapping = mmap(nullptr, kHead + size, PROT_READ, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) return -1;
    const Source source{static_cast<ucp_ep_h>(endpoint), static_cast<char *>(mapping), size, cell, nonce, 0, 0, 0};
    if (!source.is_offered()) {
        munmap(mapping, kHead + size);
        return -1;
    }
    poster.sources.push_back(source);
    ++poster.board.attached;
    const Attached told{own, poster.sources.size() - 1};
    send_control(poster, source.endpoint, {Kind::kAttached, nonce, 0}, &told, sizeof told);
    return 0;
}

// Sends messages. Returns nonzero and sends nothing if any of them is outside of the memory.
int pdserve_poster_send(void *handle, void *endpoint, uint64_t count, const uint64_t *places, uint64_t length,
                        const uint64_t *labels) {
    if (handle == nullptr) return 0;
    Poster &poster = *static_cast<Poster *>(handle);
    for (uint64_t i = 0; i < count; ++i)
        if (!poster.owns(places[i], length)) return -1;
    ucp_ep_h to = static_cast<ucp_ep_h>(endpoint);
    for (uint64_t number = 0; number < poster.targets.size(); ++number)
        if (poster.targets[number].endpoint == to && poster.targets[number].attached)
            return notify(poster, number, count, places, length, labels), 0;
    for (uint64_t i = 0; i < count && poster.board.status == UCS_OK; ++i) {
        Operation *operation = new Operation{&poster, {labels[i], places[i], length}, Report::kSent, nullptr};
        post_send(operation, to, poster.memory + places[i], length, labels[i]);
    }
    poster.count_hidden();
    return 0;
}

// Receives the messages on the board, each at its place. Returns nonzero and receives nothing if any of them is outside
// of the memory.
int pdserve_poster_receive(void *handle, const uint64_t *places) {
    if (handle == nullptr) return 0;
    Poster &poster = *static_cast<Poster *>(handle);
    Batch &arrived = poster.board.arrived;
    for (uint64_t i = 0; i < arrived.count; ++i)
        if (places[i] != kDiscard && !poster.owns(places[i], arrived.lengths[i])) return -1;
    for (uint64_t i = 0; i < arrived.count; ++i) {
        const Waiting &what = poster.shown[i];
        const Message message{what.message.label, places[i], what.message.length};
        if (what.handle == nullptr) {
            poster.copies.push_back({what.source, what.message.place, message});
            continue;
        }
        const bool wanted = places[i] != kDiscard;
        Operation *operation =
            new Operation{&poster, message, wanted ? Report::kLanded : Report::kNothing, nullptr};
        if (!wanted) operation->scratch.reset(new char[std::max<uint64_t>(message.length, 1)]);
        post_receive(operation, wanted ? poster.memory + message.place : operation->scratch.get(), message.length,
                     what.handle);
    }
    arrived.count = 0;
    poster.count_hidden();
    return 0;
}

// Takes at most `steps` steps of the worker and makes some copies, then shows on the board what is over. Returns 0 if
// there is no news.
int pdserve_poster_progress(void *handle, int steps) {
    if (handle == nullptr) return 0;
    Poster &poster = *static_cast<Poster *>(handle);
    int done = 0;
    while (done < steps && ucp_worker_progress(poster.worker)) ++done;
    bool news = done > 0;
    news |= take_controls(poster);
    for (int round = 0; round < kCopyRounds && copy_some(poster); ++round) news = true;
    news |= show(poster.sent, poster.board.sent) + show(poster.landed, poster.board.landed) > 0;
    poster.count_hidden();
    return news;
}

// Puts the next messages that have arrived on the board. The caller must have received those before.
void pdserve_poster_probe(void *handle) {
    if (handle == nullptr) return;
    Poster &poster = *static_cast<Poster *>(handle);
    Batch &arrived = poster.board.arrived;
    const auto add = [&](const Waiting &what) {
        poster.shown[arrived.count] = what;
        arrived.add(what.message);
    };
    ucp_tag_recv_info_t found;
    while (!arrived.full()) {
        ucp_tag_message_h handle = ucp_tag_probe_nb(poster.worker, 0, kControl, 1, &found);
        if (handle == nullptr) break;
        add({{found.sender_tag, 0, found.length}, handle, 0});
    }
    for (; !arrived.full() && !poster.noticed.empty(); poster.noticed.pop_front()) add(poster.noticed.front());
    poster.count_hidden();
}
}

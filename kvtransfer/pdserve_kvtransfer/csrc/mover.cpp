// Posts and completes UCX tag messages in batches: what one turn of a transfer thread does, in one call.
//
// Worker and endpoints are ucxx's, and so is their life. The messages are this file's alone: ucxx never hears of them.
// A completed operation is reported once, through the board; a failed one stops everything, through the board's status.

#include <ucp/api/ucp.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace {

constexpr uint64_t kDiscard = UINT64_MAX;
constexpr uint64_t kRoom = 256;

struct Message {
    uint64_t label, place, length;
};

struct Batch {
    uint64_t count;
    uint64_t labels[kRoom], places[kRoom], lengths[kRoom];

    bool full() const { return count == kRoom; }
    void add(const Message &message) {
        labels[count] = message.label, places[count] = message.place, lengths[count] = message.length;
        ++count;
    }
};

// Read by compiled_mover.py, which has the same fields.
struct Board {
    int64_t status;      // the first failure of any operation, 0 before
    uint64_t in_flight;  // operations
    uint64_t hidden;     // operations that are over, but not on the board yet
    Batch sent, landed;  // since the reader set their counts to 0
    Batch arrived;       // to be answered by the next receive
};

struct Mover {
    Board &board;
    ucp_worker_h worker;
    char *memory;
    uint64_t size;
    ucp_tag_message_h handles[kRoom];
    std::vector<Message> sent, landed;  // hidden

    Mover(Board &board, ucp_worker_h worker, char *memory, uint64_t size)
        : board(board), worker(worker), memory(memory), size(size) {}
    bool owns(uint64_t place, uint64_t length) const { return place <= size && length <= size - place; }
};

struct Operation {
    Mover *mover;
    Message message;
    bool sends;
    std::unique_ptr<char[]> scratch;
};

void finish(Operation *operation, ucs_status_t status) {
    Mover &mover = *operation->mover;
    --mover.board.in_flight;
    if (status != UCS_OK) {
        if (mover.board.status == UCS_OK) mover.board.status = status;
    } else if (operation->sends || !operation->scratch) {
        (operation->sends ? mover.sent : mover.landed).push_back(operation->message);
        ++mover.board.hidden;
    }
    delete operation;
}

void on_sent(void *request, ucs_status_t status, void *operation) {
    finish(static_cast<Operation *>(operation), status);
    ucp_request_free(request);
}

void on_received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *, void *operation) {
    finish(static_cast<Operation *>(operation), status);
    ucp_request_free(request);
}

// What a post has returned: an operation that is over at once has no callback.
void posted(Operation *operation, ucs_status_ptr_t request) {
    if (request == nullptr) {
        finish(operation, UCS_OK);
    } else if (UCS_PTR_IS_ERR(request)) {
        finish(operation, UCS_PTR_STATUS(request));
    }
}

// As much as there is room for. Returns how much that was.
uint64_t show(std::vector<Message> &hidden, Batch &batch) {
    const uint64_t count = std::min<uint64_t>(hidden.size(), kRoom - batch.count);
    for (uint64_t i = 0; i < count; ++i) batch.add(hidden[i]);
    hidden.erase(hidden.begin(), hidden.begin() + count);
    return count;
}

}  // namespace

extern "C" {

// The board is the caller's, and outlives the mover.
void *pdserve_mover_open(void *worker, void *memory, uint64_t size, void *board) {
    return new Mover(*static_cast<Board *>(board), static_cast<ucp_worker_h>(worker), static_cast<char *>(memory), size);
}

// When nothing is in flight, or the worker is gone. The other functions do nothing with the null that is left.
void pdserve_mover_free(void *handle) { delete static_cast<Mover *>(handle); }

// Nonzero, and nothing is sent, if any of it is outside of the memory.
int pdserve_mover_send(void *handle, void *endpoint, uint64_t count, const uint64_t *places, uint64_t length,
                       const uint64_t *labels) {
    if (handle == nullptr) return 0;
    Mover &mover = *static_cast<Mover *>(handle);
    for (uint64_t i = 0; i < count; ++i)
        if (!mover.owns(places[i], length)) return -1;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = on_sent;
    for (uint64_t i = 0; i < count && mover.board.status == UCS_OK; ++i) {
        Operation *operation = new Operation{&mover, {labels[i], places[i], length}, true, nullptr};
        param.user_data = operation;
        ++mover.board.in_flight;
        ucp_ep_h to = static_cast<ucp_ep_h>(endpoint);
        posted(operation, ucp_tag_send_nbx(to, mover.memory + places[i], length, labels[i], &param));
    }
    return 0;
}

// The messages on the board, one place each. Nonzero, and nothing is received, if any of it is outside of the memory.
int pdserve_mover_receive(void *handle, const uint64_t *places) {
    if (handle == nullptr) return 0;
    Mover &mover = *static_cast<Mover *>(handle);
    Batch &arrived = mover.board.arrived;
    for (uint64_t i = 0; i < arrived.count; ++i)
        if (places[i] != kDiscard && !mover.owns(places[i], arrived.lengths[i])) return -1;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.recv = on_received;
    for (uint64_t i = 0; i < arrived.count; ++i) {
        Message message{arrived.labels[i], places[i], arrived.lengths[i]};
        Operation *operation = new Operation{&mover, message, false, nullptr};
        if (places[i] == kDiscard) operation->scratch.reset(new char[std::max<uint64_t>(message.length, 1)]);
        char *into = operation->scratch ? operation->scratch.get() : mover.memory + message.place;
        param.user_data = operation;
        ++mover.board.in_flight;
        posted(operation, ucp_tag_msg_recv_nbx(mover.worker, into, message.length, mover.handles[i], &param));
    }
    arrived.count = 0;
    return 0;
}

// At most so many steps of the worker; then the board shows what is over. Returns 0 if there is no news.
int pdserve_mover_progress(void *handle, int steps) {
    if (handle == nullptr) return 0;
    Mover &mover = *static_cast<Mover *>(handle);
    int done = 0;
    while (done < steps && ucp_worker_progress(mover.worker)) ++done;
    const uint64_t shown = show(mover.sent, mover.board.sent) + show(mover.landed, mover.board.landed);
    mover.board.hidden -= shown;
    return done > 0 || shown > 0;
}

// Puts the next messages that have arrived on the board; those before must have been received.
void pdserve_mover_look(void *handle) {
    if (handle == nullptr) return;
    Mover &mover = *static_cast<Mover *>(handle);
    Batch &arrived = mover.board.arrived;
    while (!arrived.full()) {
        ucp_tag_recv_info_t found;
        ucp_tag_message_h message = ucp_tag_probe_nb(mover.worker, 0, 0, 1, &found);
        if (message == nullptr) return;
        mover.handles[arrived.count] = message;
        arrived.add({found.sender_tag, 0, found.length});
    }
}
}

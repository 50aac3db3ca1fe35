// What a mover is made of, and how it posts a message to UCX.
//
// Worker and endpoints are ucxx's, and so is their life. The messages are this folder's alone: ucxx never hears of them.
// A completed operation is reported once, through the board; a failure of any stops everything, through its status.

#pragma once

#include <sys/mman.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include "copy.h"

namespace {

constexpr uint64_t kDiscard = UINT64_MAX;
constexpr uint64_t kRoom = 256;

// Bit 63 of a UCX tag, over a block's label.
constexpr uint64_t kControl = uint64_t{1} << 63;

// On the board beside UCX's own, which are negative.
constexpr int64_t kWithdrawn = 1, kNonsense = 2;

// Fits one fragment of any transport.
constexpr uint64_t kNoticeRoom = 64;
constexpr uint64_t kMostNoticed = 1 << 16;
// Of strangers' that do not come to an end.
constexpr uint64_t kMostControls = 1 << 10;
// Between two acknowledgements.
constexpr uint64_t kCopyAtOnce = 1 << 20;
constexpr int kCopyRounds = 8;
// One page of cells before the memory, as shared_memory.py has it.
constexpr uint64_t kHead = 4096, kCells = kHead / sizeof(uint64_t);

struct Message {
    uint64_t label, place, length;
    uint64_t digest = 0;  // of the bytes that have landed, seeded with the label
};

struct Batch {
    uint64_t count;
    uint64_t labels[kRoom], places[kRoom], lengths[kRoom], digests[kRoom];

    bool full() const { return count == kRoom; }
    void add(const Message &message) {
        labels[count] = message.label, places[count] = message.place, lengths[count] = message.length;
        digests[count] = message.digest;
        ++count;
    }
};

// Read by compiled_mover.py, which has the same fields.
struct Board {
    int64_t status;      // the first failure of any operation, 0 before
    uint64_t in_flight;  // operations of UCX
    uint64_t attached;   // ends of links whose blocks are copied from mapped memory
    uint64_t hidden;     // what is over or has arrived, but is not on the board yet, and copies still to make
    Batch sent, landed;  // since the reader set their counts to 0
    Batch arrived;       // to be answered by the next receive
};

// The other side of an endpoint that blocks are sent to.
struct Target {
    ucp_ep_h endpoint;
    uint64_t link;                    // of its address
    bool attached;                    // it has mapped this memory
    uint64_t source;                  // what it calls this link
    uint64_t notices;                 // sent
    std::deque<Message> outstanding;  // noticed and not acknowledged
};

// Mapped memory that blocks are copied from.
struct Source {
    ucp_ep_h endpoint;
    char *mapping;
    uint64_t size;  // without the head
    uint64_t cell, nonce;
    uint64_t target;   // what it calls this link
    uint64_t notices;  // heard
    uint64_t copied;   // blocks, not acknowledged

    bool stands() const {
        return __atomic_load_n(reinterpret_cast<const uint64_t *>(mapping) + cell, __ATOMIC_ACQUIRE) == nonce;
    }
};

enum class Kind : uint64_t { kAttached, kNotice, kAcknowledgement };

// Before every message under kControl. Its nonce is the memory's, which only those know who were told.
struct Head {
    Kind kind;
    uint64_t nonce, number;  // of the receiver's target or source
};

struct Attached {
    uint64_t link, source;
};

struct Notice {
    uint64_t target, length;
    uint64_t serial;  // from 0: they are acknowledged in their order
    struct {
        uint64_t label, place;
    } blocks[kNoticeRoom];
};
constexpr uint64_t kNoticeHead = 3 * sizeof(uint64_t), kNoticeEach = 2 * sizeof(uint64_t);
constexpr uint64_t kMostControl = sizeof(Head) + sizeof(Notice);

// What has arrived and nobody has decided about: a message of UCX's, or a block of a source.
struct Waiting {
    Message message;
    ucp_tag_message_h handle;  // null for a block, whose place is the source's
    uint64_t source;
};

struct Copy {
    uint64_t source, from;
    Message message;  // its place is this memory's, or kDiscard
};

// A message under kControl. One that cannot be received, or is longer than any, is complete and empty.
struct Control {
    Board *board;
    uint64_t length;
    bool complete;
    char bytes[kMostControl];
};

struct Mover {
    Board &board;
    ucp_worker_h worker;
    char *memory;
    uint64_t size;
    Xxhash xxhash;             // null if nobody wants digests
    uint64_t *cell = nullptr;  // of this memory, if others may map it
    uint64_t nonce = 0;
    Waiting shown[kRoom];  // as the board's arrived
    std::vector<Message> sent, landed;
    std::deque<Waiting> noticed;   // only blocks
    std::list<Control> controls;  // in the order of arrival
    std::deque<Copy> copies;
    std::vector<Target> targets;
    std::vector<Source> sources;
    std::vector<Attached> attached;

    Mover(Board &board, ucp_worker_h worker, char *memory, uint64_t size, Xxhash xxhash)
        : board(board), worker(worker), memory(memory), size(size), xxhash(xxhash) {}
    ~Mover() {
        for (const Source &source : sources) munmap(source.mapping, kHead + source.size);
    }
    bool owns(uint64_t place, uint64_t length) const { return place <= size && length <= size - place; }
    void fail(int64_t status) {
        if (board.status == UCS_OK) board.status = status;
    }
    void count_hidden() {
        board.hidden = sent.size() + landed.size() + noticed.size() + copies.size();
    }
};

enum class Report { kSent, kLanded, kNothing };

struct Operation {
    Mover *mover;
    Message message;
    Report report;
    std::unique_ptr<char[]> scratch;  // holds what UCX reads or writes, where that is nobody's memory
};

// While what UCX has copied is still in the core's cache.
Message digested(const Mover &mover, Message message) {
    if (mover.xxhash.digest != nullptr)
        message.digest = mover.xxhash.digest(mover.memory + message.place, message.length, message.label);
    return message;
}

void finish(Operation *operation, ucs_status_t status) {
    Mover &mover = *operation->mover;
    --mover.board.in_flight;
    if (status != UCS_OK) {
        mover.fail(status);
    } else {
        if (operation->report == Report::kSent) mover.sent.push_back(operation->message);
        if (operation->report == Report::kLanded) mover.landed.push_back(digested(mover, operation->message));
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

void post_send(Operation *operation, ucp_ep_h to, const void *bytes, uint64_t length, uint64_t tag) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = on_sent;
    param.user_data = operation;
    ++operation->mover->board.in_flight;
    posted(operation, ucp_tag_send_nbx(to, bytes, length, tag, &param));
}

void post_receive(Operation *operation, void *into, uint64_t length, ucp_tag_message_h handle) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.recv = on_received;
    param.user_data = operation;
    ++operation->mover->board.in_flight;
    posted(operation, ucp_tag_msg_recv_nbx(operation->mover->worker, into, length, handle, &param));
}

// Anybody may send one, so that nothing is wrong with this side if it fails.
void on_control(void *request, ucs_status_t status, const ucp_tag_recv_info_t *, void *user_data) {
    Control &control = *static_cast<Control *>(user_data);
    --control.board->in_flight;
    control.complete = true;
    if (status != UCS_OK) control.length = 0;
    if (request != nullptr) ucp_request_free(request);
}

void receive_control(Mover &mover, uint64_t length, ucp_tag_message_h handle) {
    Control &control = mover.controls.emplace_back();
    control.board = &mover.board;
    control.length = length;
    control.complete = false;
    ++mover.board.in_flight;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.recv = on_control;
    param.user_data = &control;
    ucs_status_ptr_t request = ucp_tag_msg_recv_nbx(mover.worker, control.bytes, sizeof control.bytes, handle, &param);
    if (!UCS_PTR_IS_PTR(request)) on_control(nullptr, UCS_PTR_RAW_STATUS(request), nullptr, &control);
}

void send_control(Mover &mover, ucp_ep_h to, const Head &head, const void *bytes, uint64_t length) {
    std::unique_ptr<char[]> copy(new char[sizeof head + length]);
    std::memcpy(copy.get(), &head, sizeof head);
    std::memcpy(copy.get() + sizeof head, bytes, length);
    const char *held = copy.get();
    Operation *operation = new Operation{&mover, {}, Report::kNothing, std::move(copy)};
    post_send(operation, to, held, sizeof head + length, kControl);
}

}  // namespace

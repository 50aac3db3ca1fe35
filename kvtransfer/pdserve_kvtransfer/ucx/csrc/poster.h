// The state of a poster, and how it posts a message to UCX.
//
// ucxx owns the worker and the endpoints. The messages belong to this folder alone: ucxx does not know of them. The
// board reports each completed operation once. If an operation fails, the board's status says so, and everything stops.

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

// Bit 63 of a UCX tag. The bits below it are a message's label.
constexpr uint64_t kControl = uint64_t{1} << 63;

// The poster's own statuses on the board. UCX's are negative.
constexpr int64_t kWithdrawn = 1, kMalformed = 2;

// A notice of so many blocks fits one fragment of any transport.
constexpr uint64_t kNoticeRoom = 64;
constexpr uint64_t kMaxNoticed = 1 << 16;
// More control messages than this that never become complete are a stranger's attack.
constexpr uint64_t kMaxControls = 1 << 10;
// So many bytes are copied between two acknowledgements.
constexpr uint64_t kCopyAtOnce = 1 << 20;
constexpr int kCopyRounds = 8;
// One page of cells lies before the memory, as shared_memory.py lays it out.
constexpr uint64_t kHead = 4096, kCells = kHead / sizeof(uint64_t);

struct Message {
    uint64_t label, place, length;
    uint64_t digest = 0;  // the digest of the bytes that have landed, seeded with the label
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

// The results that compiled_poster.py reads. Its _Board has the same fields.
struct Board {
    int64_t status;      // the first failure of any operation; 0 before
    uint64_t in_flight;  // operations that UCX has
    uint64_t attached;   // ends of links whose blocks are copied from mapped memory
    uint64_t hidden;     // messages that are over or have arrived but are not on the board, and copies still to make
    Batch sent, landed;  // messages since the reader last set the counts to 0
    Batch arrived;       // messages that the next receive must answer
};

// The other side of an endpoint that blocks are sent to.
struct Target {
    ucp_ep_h endpoint;
    uint64_t link;                    // the link number in its address
    bool attached;                    // whether it has mapped this memory
    uint64_t source;                  // the number of this link among its sources
    uint64_t notices;                 // notices sent to it
    std::deque<Message> outstanding;  // messages in notices that it has not acknowledged
};

// Mapped memory that blocks are copied from.
struct Source {
    ucp_ep_h endpoint;
    char *mapping;
    uint64_t size;  // without the head
    uint64_t cell, nonce;
    uint64_t target;   // the number of this link among its targets
    uint64_t notices;  // notices received from it
    uint64_t copied;   // blocks copied and not acknowledged

    bool is_offered() const {
        return __atomic_load_n(reinterpret_cast<const uint64_t *>(mapping) + cell, __ATOMIC_ACQUIRE) == nonce;
    }
};

enum class Kind : uint64_t { kAttached, kNotice, kAcknowledgement };

// The beginning of every control message. Its nonce is the memory's, which only those know who were told.
struct Head {
    Kind kind;
    uint64_t nonce, number;  // number: of the receiver's target or source
};

struct Attached {
    uint64_t link, source;
};

struct Notice {
    uint64_t target, length;
    uint64_t serial;  // counts from 0, because blocks are acknowledged in the order of the notices
    struct {
        uint64_t label, place;
    } blocks[kNoticeRoom];
};
constexpr uint64_t kNoticeHead = 3 * sizeof(uint64_t), kNoticeEach = 2 * sizeof(uint64_t);
constexpr uint64_t kMaxControl = sizeof(Head) + sizeof(Notice);

// An arrival that the reader has not decided about: a message of UCX's, or a block of a source.
struct Waiting {
    Message message;
    ucp_tag_message_h handle;  // null for a block, whose place is in the source's memory
    uint64_t source;
};

struct Copy {
    uint64_t source, from;
    Message message;  // its place is in this memory, or kDiscard
};

// A control message: one whose UCX tag has kControl. If it cannot be received or is too long, it is complete and empty.
struct Control {
    Board *board;
    uint64_t length;
    bool complete;
    char bytes[kMaxControl];
};

struct Poster {
    Board &board;
    ucp_worker_h worker;
    char *memory;
    uint64_t size;
    Xxhash xxhash;             // its functions are null if no digests are wanted
    ucp_context_h context = nullptr;
    ucp_mem_h registered = nullptr;  // the whole memory, if it is registered with `context`
    uint64_t *cell = nullptr;  // the cell of this memory, if others may map it
    uint64_t nonce = 0;
    Waiting shown[kRoom];  // the arrivals on the board
    std::vector<Message> sent, landed;
    std::deque<Waiting> noticed;  // blocks alone
    std::list<Control> controls;  // in the order of arrival
    std::deque<Copy> copies;
    std::vector<Target> targets;
    std::vector<Source> sources;
    std::vector<Attached> attached;

    Poster(Board &board, ucp_worker_h worker, char *memory, uint64_t size, Xxhash xxhash)
        : board(board), worker(worker), memory(memory), size(size), xxhash(xxhash) {}
    ~Poster() {
        // With operations in flight the worker was destroyed by force. Those may still be found through the context,
        // which stays until the process ends, and so does what is registered with it.
        if (registered != nullptr && board.in_flight == 0) ucp_mem_unmap(context, registered);
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
    Poster *poster;
    Message message;
    Report report;
    std::unique_ptr<char[]> scratch;  // the bytes that UCX reads or writes, where those are not in the KV memory
};

// Adds the digest, while the bytes that UCX has copied are still in the core's cache.
Message digested(const Poster &poster, Message message) {
    if (poster.xxhash.digest != nullptr)
        message.digest = poster.xxhash.digest(poster.memory + message.place, message.length, message.label);
    return message;
}

void finish(Operation *operation, ucs_status_t status) {
    Poster &poster = *operation->poster;
    --poster.board.in_flight;
    if (status != UCS_OK) {
        poster.fail(status);
    } else {
        if (operation->report == Report::kSent) poster.sent.push_back(operation->message);
        if (operation->report == Report::kLanded) poster.landed.push_back(digested(poster, operation->message));
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

// Handles the result of a post. An operation that is over at once has no callback.
void posted(Operation *operation, ucs_status_ptr_t request) {
    if (request == nullptr) {
        finish(operation, UCS_OK);
    } else if (UCS_PTR_IS_ERR(request)) {
        finish(operation, UCS_PTR_STATUS(request));
    }
}

// The parameters of an operation. Its bytes are in the KV memory, unless it has bytes of its own.
ucp_request_param_t params_of(Operation *operation) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.user_data = operation;
    if (operation->poster->registered != nullptr && operation->scratch == nullptr) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = operation->poster->registered;
    }
    return param;
}

void post_send(Operation *operation, ucp_ep_h to, const void *bytes, uint64_t length, uint64_t tag) {
    ucp_request_param_t param = params_of(operation);
    param.cb.send = on_sent;
    ++operation->poster->board.in_flight;
    posted(operation, ucp_tag_send_nbx(to, bytes, length, tag, &param));
}

void post_receive(Operation *operation, void *into, uint64_t length, ucp_tag_message_h handle) {
    ucp_request_param_t param = params_of(operation);
    param.cb.recv = on_received;
    ++operation->poster->board.in_flight;
    posted(operation, ucp_tag_msg_recv_nbx(operation->poster->worker, into, length, handle, &param));
}

// Completes a control message. Anybody may send one, so a failure does not stop this side.
void on_control(void *request, ucs_status_t status, const ucp_tag_recv_info_t *, void *user_data) {
    Control &control = *static_cast<Control *>(user_data);
    --control.board->in_flight;
    control.complete = true;
    if (status != UCS_OK) control.length = 0;
    if (request != nullptr) ucp_request_free(request);
}

void receive_control(Poster &poster, uint64_t length, ucp_tag_message_h handle) {
    Control &control = poster.controls.emplace_back();
    control.board = &poster.board;
    control.length = length;
    control.complete = false;
    ++poster.board.in_flight;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.recv = on_control;
    param.user_data = &control;
    ucs_status_ptr_t request = ucp_tag_msg_recv_nbx(poster.worker, control.bytes, sizeof control.bytes, handle, &param);
    if (!UCS_PTR_IS_PTR(request)) on_control(nullptr, UCS_PTR_RAW_STATUS(request), nullptr, &control);
}

void send_control(Poster &poster, ucp_ep_h to, const Head &head, const void *bytes, uint64_t length) {
    std::unique_ptr<char[]> copy(new char[sizeof head + length]);
    std::memcpy(copy.get(), &head, sizeof head);
    std::memcpy(copy.get() + sizeof head, bytes, length);
    const char *held = copy.get();
    Operation *operation = new Operation{&poster, {}, Report::kNothing, std::move(copy)};
    post_send(operation, to, held, sizeof head + length, kControl);
}

}  // namespace

// Moves blocks without a message for each, because the receiver has mapped the sender's memory.
//
// A notice says where blocks are, the receiver copies them, and an acknowledgement tells the sender that they were
// copied. The sender's cell holds the link's nonce for as long as the receiver may copy. After each copy the receiver
// looks at the cell again, as the reader of a seqlock does: the copy counts only if the nonce is still there.

#pragma once

#include <atomic>

#include "poster.h"

namespace {

// Marks the targets whose other side has attached. It may say so before this side has connected.
void mark_attached(Poster &poster) {
    for (const Attached &one : poster.attached)
        for (Target &target : poster.targets)
            if (target.link == one.link && !target.attached)
                target.attached = true, target.source = one.source, ++poster.board.attached;
}

enum class Handled { kDone, kTooEarly, kMalformed };

Handled handle_attached(Poster &poster, const char *bytes, uint64_t length) {
    Attached one;
    if (length != sizeof one || poster.attached.size() == kRoom) return Handled::kMalformed;
    std::memcpy(&one, bytes, sizeof one);
    poster.attached.push_back(one);
    mark_attached(poster);
    return Handled::kDone;
}

Handled handle_notice(Poster &poster, uint64_t number, const char *bytes, uint64_t length) {
    if (length < kNoticeHead || length > sizeof(Notice) || (length - kNoticeHead) % kNoticeEach)
        return Handled::kMalformed;
    if (poster.noticed.size() > kMaxNoticed) return Handled::kMalformed;
    Source &source = poster.sources[number];
    Notice notice;
    std::memcpy(&notice, bytes, length);
    if (notice.serial > source.notices) return Handled::kTooEarly;
    if (notice.serial < source.notices) return Handled::kMalformed;
    ++source.notices;
    source.target = notice.target;
    for (uint64_t i = 0; i < (length - kNoticeHead) / kNoticeEach; ++i) {
        const uint64_t label = notice.blocks[i].label, place = notice.blocks[i].place;
        if (label & kControl || place > source.size || notice.length > source.size - place)
            return Handled::kMalformed;
        poster.noticed.push_back({{label, place, notice.length}, nullptr, number});
    }
    return Handled::kDone;
}

Handled handle_acknowledgement(Poster &poster, uint64_t number, const char *bytes, uint64_t length) {
    uint64_t count;
    if (number >= poster.targets.size() || length != sizeof count) return Handled::kMalformed;
    std::memcpy(&count, bytes, sizeof count);
    std::deque<Message> &outstanding = poster.targets[number].outstanding;
    if (count > outstanding.size()) return Handled::kMalformed;
    poster.sent.insert(poster.sent.end(), outstanding.begin(), outstanding.begin() + count);
    outstanding.erase(outstanding.begin(), outstanding.begin() + count);
    return Handled::kDone;
}

// Handles one control message. A message without the nonce is a stranger's and is ignored, so only a peer that knows the
// nonce can send a malformed one.
Handled handle_control(Poster &poster, const Control &control) {
    Head head;
    if (control.length < sizeof head) return Handled::kDone;
    std::memcpy(&head, control.bytes, sizeof head);
    const char *bytes = control.bytes + sizeof head;
    const uint64_t length = control.length - sizeof head;
    if (head.kind == Kind::kNotice) {
        if (head.number >= poster.sources.size() || poster.sources[head.number].nonce != head.nonce)
            return Handled::kDone;
        return handle_notice(poster, head.number, bytes, length);
    }
    if (poster.cell == nullptr || poster.nonce != head.nonce) return Handled::kDone;
    if (head.kind == Kind::kAttached) return handle_attached(poster, bytes, length);
    if (head.kind == Kind::kAcknowledgement) return handle_acknowledgement(poster, head.number, bytes, length);
    return Handled::kMalformed;
}

// Handles the control messages that have arrived. An incomplete message is a stranger's, or it exceeds the rendezvous
// threshold that UCX was given: later messages are handled before it.
void handle_controls(Poster &poster) {
    for (auto control = poster.controls.begin(); control != poster.controls.end();) {
        const Handled handled = control->complete ? handle_control(poster, *control) : Handled::kTooEarly;
        if (handled == Handled::kMalformed) poster.fail(kMalformed);
        if (handled == Handled::kTooEarly)
            ++control;
        else
            control = poster.controls.erase(control);
    }
    if (poster.controls.size() > kMaxControls) poster.fail(kMalformed);
}

// Receives the control messages that have arrived. Returns whether there were any.
bool take_controls(Poster &poster) {
    bool any = false;
    ucp_tag_recv_info_t found;
    while (ucp_tag_message_h handle = ucp_tag_probe_nb(poster.worker, kControl, kControl, 1, &found)) {
        any = true;
        receive_control(poster, found.length, handle);
    }
    if (!poster.controls.empty()) handle_controls(poster);
    return any;
}

void acknowledge(Poster &poster) {
    for (Source &source : poster.sources) {
        if (source.copied == 0) continue;
        const Head head{Kind::kAcknowledgement, source.nonce, source.target};
        send_control(poster, source.endpoint, head, &source.copied, sizeof source.copied);
        source.copied = 0;
    }
}

// Copies some of the accepted blocks. Returns whether there were any.
bool copy_some(Poster &poster) {
    uint64_t left = kCopyAtOnce;
    bool any = false;
    while (!poster.copies.empty() && left > 0 && poster.board.status == UCS_OK) {
        any = true;
        Copy &one = poster.copies.front();
        Source &source = poster.sources[one.source];
        if (one.message.place != kDiscard) {
            Message &block = one.message;
            if (!source.is_offered()) return poster.fail(kWithdrawn), any;
            char *to = poster.memory + block.place;
            block.digest = copy(to, source.mapping + kHead + one.from, block.length, block.label, poster.xxhash);
            std::atomic_thread_fence(std::memory_order_acquire);
            if (!source.is_offered()) return poster.fail(kWithdrawn), any;
            poster.landed.push_back(block);
            left -= std::min(left, block.length);
        }
        ++source.copied;
        poster.copies.pop_front();
    }
    if (any) acknowledge(poster);
    return any;
}

void notify(Poster &poster, uint64_t number, uint64_t count, const uint64_t *places, uint64_t length,
            const uint64_t *labels) {
    Target &target = poster.targets[number];
    for (uint64_t start = 0; start < count && poster.board.status == UCS_OK; start += kNoticeRoom) {
        const uint64_t some = std::min(kNoticeRoom, count - start);
        Notice notice{number, length, target.notices++, {}};
        for (uint64_t i = 0; i < some; ++i) {
            notice.blocks[i] = {labels[start + i], places[start + i]};
            target.outstanding.push_back({labels[start + i], places[start + i], length});
        }
        const Head head{Kind::kNotice, poster.nonce, target.source};
        send_control(poster, target.endpoint, head, &notice, kNoticeHead + some * kNoticeEach);
    }
}

}  // namespace

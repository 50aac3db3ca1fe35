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
void match(Poster &poster) {
    for (const Attached &one : poster.attached)
        for (Target &target : poster.targets)
            if (target.link == one.link && !target.attached)
                target.attached = true, target.source = one.source, ++poster.board.attached;
}

enum class Heard { kYes, kNotYet, kNonsense };

Heard hear_attached(Poster &poster, const char *bytes, uint64_t length) {
    Attached one;
    if (length != sizeof one || poster.attached.size() == kRoom) return Heard::kNonsense;
    std::memcpy(&one, bytes, sizeof one);
    poster.attached.push_back(one);
    match(poster);
    return Heard::kYes;
}

Heard hear_notice(Poster &poster, uint64_t number, const char *bytes, uint64_t length) {
    if (length < kNoticeHead || length > sizeof(Notice) || (length - kNoticeHead) % kNoticeEach) return Heard::kNonsense;
    if (poster.noticed.size() > kMostNoticed) return Heard::kNonsense;
    Source &source = poster.sources[number];
    Notice notice;
    std::memcpy(&notice, bytes, length);
    if (notice.serial > source.notices) return Heard::kNotYet;
    if (notice.serial < source.notices) return Heard::kNonsense;
    ++source.notices;
    source.target = notice.target;
    for (uint64_t i = 0; i < (length - kNoticeHead) / kNoticeEach; ++i) {
        const uint64_t label = notice.blocks[i].label, place = notice.blocks[i].place;
        if (label & kControl || place > source.size || notice.length > source.size - place)
            return Heard::kNonsense;
        poster.noticed.push_back({{label, place, notice.length}, nullptr, number});
    }
    return Heard::kYes;
}

Heard hear_acknowledgement(Poster &poster, uint64_t number, const char *bytes, uint64_t length) {
    uint64_t count;
    if (number >= poster.targets.size() || length != sizeof count) return Heard::kNonsense;
    std::memcpy(&count, bytes, sizeof count);
    std::deque<Message> &outstanding = poster.targets[number].outstanding;
    if (count > outstanding.size()) return Heard::kNonsense;
    poster.sent.insert(poster.sent.end(), outstanding.begin(), outstanding.begin() + count);
    outstanding.erase(outstanding.begin(), outstanding.begin() + count);
    return Heard::kYes;
}

// Handles one control message. Messages without the nonce are a stranger's and are ignored: only a peer that knows the
// nonce can send nonsense.
Heard hear(Poster &poster, const Control &control) {
    Head head;
    if (control.length < sizeof head) return Heard::kYes;
    std::memcpy(&head, control.bytes, sizeof head);
    const char *bytes = control.bytes + sizeof head;
    const uint64_t length = control.length - sizeof head;
    if (head.kind == Kind::kNotice) {
        if (head.number >= poster.sources.size() || poster.sources[head.number].nonce != head.nonce)
            return Heard::kYes;
        return hear_notice(poster, head.number, bytes, length);
    }
    if (poster.cell == nullptr || poster.nonce != head.nonce) return Heard::kYes;
    if (head.kind == Kind::kAttached) return hear_attached(poster, bytes, length);
    if (head.kind == Kind::kAcknowledgement) return hear_acknowledgement(poster, head.number, bytes, length);
    return Heard::kNonsense;
}

// Handles the control messages that have arrived. An incomplete message is a stranger's, or it exceeds the rendezvous
// threshold that UCX was given: later messages are handled before it.
void hear_all(Poster &poster) {
    for (auto control = poster.controls.begin(); control != poster.controls.end();) {
        const Heard heard = control->complete ? hear(poster, *control) : Heard::kNotYet;
        if (heard == Heard::kNonsense) poster.fail(kNonsense);
        if (heard == Heard::kNotYet)
            ++control;
        else
            control = poster.controls.erase(control);
    }
    if (poster.controls.size() > kMostControls) poster.fail(kNonsense);
}

// Receives the control messages that have arrived. Returns whether there were any.
bool take_controls(Poster &poster) {
    bool any = false;
    ucp_tag_recv_info_t found;
    while (ucp_tag_message_h handle = ucp_tag_probe_nb(poster.worker, kControl, kControl, 1, &found)) {
        any = true;
        receive_control(poster, found.length, handle);
    }
    if (!poster.controls.empty()) hear_all(poster);
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
            if (!source.stands()) return poster.fail(kWithdrawn), any;
            char *to = poster.memory + block.place;
            block.digest = copy(to, source.mapping + kHead + one.from, block.length, block.label, poster.xxhash);
            std::atomic_thread_fence(std::memory_order_acquire);
            if (!source.stands()) return poster.fail(kWithdrawn), any;
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

// Blocks that no message carries, because the receiver has mapped the sender's memory.
//
// A notice says where blocks are, the receiver copies them, and an acknowledgement gives them back. The sender's cell
// holds the link's nonce for as long as that may be. Whoever has copied looks at it again, as the reader of a seqlock
// does, and what was copied counts only if the nonce is still there.

#pragma once

#include <atomic>

#include "mover.h"

namespace {

// The other side may say that it has attached before this one has connected.
void match(Mover &mover) {
    for (const Attached &one : mover.attached)
        for (Target &target : mover.targets)
            if (target.link == one.link && !target.attached)
                target.attached = true, target.source = one.source, ++mover.board.attached;
}

enum class Heard { kYes, kNotYet, kNonsense };

Heard hear_attached(Mover &mover, const char *bytes, uint64_t length) {
    Attached one;
    if (length != sizeof one || mover.attached.size() == kRoom) return Heard::kNonsense;
    std::memcpy(&one, bytes, sizeof one);
    mover.attached.push_back(one);
    match(mover);
    return Heard::kYes;
}

Heard hear_notice(Mover &mover, uint64_t number, const char *bytes, uint64_t length) {
    if (length < kNoticeHead || length > sizeof(Notice) || (length - kNoticeHead) % kNoticeEach) return Heard::kNonsense;
    if (mover.noticed.size() > kMostNoticed) return Heard::kNonsense;
    Source &source = mover.sources[number];
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
        mover.noticed.push_back({{label, place, notice.length}, nullptr, number});
    }
    return Heard::kYes;
}

Heard hear_acknowledgement(Mover &mover, uint64_t number, const char *bytes, uint64_t length) {
    uint64_t count;
    if (number >= mover.targets.size() || length != sizeof count) return Heard::kNonsense;
    std::memcpy(&count, bytes, sizeof count);
    std::deque<Message> &outstanding = mover.targets[number].outstanding;
    if (count > outstanding.size()) return Heard::kNonsense;
    mover.sent.insert(mover.sent.end(), outstanding.begin(), outstanding.begin() + count);
    outstanding.erase(outstanding.begin(), outstanding.begin() + count);
    return Heard::kYes;
}

// Nonsense is of one who knows the nonce. Strangers are not listened to.
Heard hear(Mover &mover, const Control &control) {
    Head head;
    if (control.length < sizeof head) return Heard::kYes;
    std::memcpy(&head, control.bytes, sizeof head);
    const char *bytes = control.bytes + sizeof head;
    const uint64_t length = control.length - sizeof head;
    if (head.kind == Kind::kNotice) {
        if (head.number >= mover.sources.size() || mover.sources[head.number].nonce != head.nonce)
            return Heard::kYes;
        return hear_notice(mover, head.number, bytes, length);
    }
    if (mover.cell == nullptr || mover.nonce != head.nonce) return Heard::kYes;
    if (head.kind == Kind::kAttached) return hear_attached(mover, bytes, length);
    if (head.kind == Kind::kAcknowledgement) return hear_acknowledgement(mover, head.number, bytes, length);
    return Heard::kNonsense;
}

// What is not complete is a stranger's, or large for the rendezvous threshold that UCX was given: others go before it.
void hear_all(Mover &mover) {
    for (auto control = mover.controls.begin(); control != mover.controls.end();) {
        const Heard heard = control->complete ? hear(mover, *control) : Heard::kNotYet;
        if (heard == Heard::kNonsense) mover.fail(kNonsense);
        if (heard == Heard::kNotYet)
            ++control;
        else
            control = mover.controls.erase(control);
    }
    if (mover.controls.size() > kMostControls) mover.fail(kNonsense);
}

// Reads what has come under kControl. Returns whether anything had.
bool take_controls(Mover &mover) {
    bool any = false;
    ucp_tag_recv_info_t found;
    while (ucp_tag_message_h handle = ucp_tag_probe_nb(mover.worker, kControl, kControl, 1, &found)) {
        any = true;
        receive_control(mover, found.length, handle);
    }
    if (!mover.controls.empty()) hear_all(mover);
    return any;
}

void acknowledge(Mover &mover) {
    for (Source &source : mover.sources) {
        if (source.copied == 0) continue;
        const Head head{Kind::kAcknowledgement, source.nonce, source.target};
        send_control(mover, source.endpoint, head, &source.copied, sizeof source.copied);
        source.copied = 0;
    }
}

// Some of what was accepted. Returns whether there was any.
bool copy_some(Mover &mover) {
    uint64_t left = kCopyAtOnce;
    bool any = false;
    while (!mover.copies.empty() && left > 0 && mover.board.status == UCS_OK) {
        any = true;
        Copy &one = mover.copies.front();
        Source &source = mover.sources[one.source];
        if (one.message.place != kDiscard) {
            Message &block = one.message;
            if (!source.stands()) return mover.fail(kWithdrawn), any;
            char *to = mover.memory + block.place;
            block.digest = copy(to, source.mapping + kHead + one.from, block.length, block.label, mover.xxhash);
            std::atomic_thread_fence(std::memory_order_acquire);
            if (!source.stands()) return mover.fail(kWithdrawn), any;
            mover.landed.push_back(block);
            left -= std::min(left, block.length);
        }
        ++source.copied;
        mover.copies.pop_front();
    }
    if (any) acknowledge(mover);
    return any;
}

void notify(Mover &mover, uint64_t number, uint64_t count, const uint64_t *places, uint64_t length,
            const uint64_t *labels) {
    Target &target = mover.targets[number];
    for (uint64_t start = 0; start < count && mover.board.status == UCS_OK; start += kNoticeRoom) {
        const uint64_t some = std::min(kNoticeRoom, count - start);
        Notice notice{number, length, target.notices++, {}};
        for (uint64_t i = 0; i < some; ++i) {
            notice.blocks[i] = {labels[start + i], places[start + i]};
            target.outstanding.push_back({labels[start + i], places[start + i], length});
        }
        const Head head{Kind::kNotice, mover.nonce, target.source};
        send_control(mover, target.endpoint, head, &notice, kNoticeHead + some * kNoticeEach);
    }
}

}  // namespace

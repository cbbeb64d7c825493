//! The members of open objects, which are sorted when their object closes.

use std::ops::Range;

use crate::fingerprint::invalid_body::InvalidBody;

/// All open objects, the innermost one last. They share these buffers, so that no object allocates.
#[derive(Default)]
pub(super) struct OpenObjects {
    count: usize,
    members: Vec<Member>,
    /// The unescaped names by which members are sorted, one after the other.
    names: Vec<u8>,
    sorted: Vec<u8>,
}

struct Member {
    name: Range<usize>,
    /// The place of `"name":value` in the text.
    text: Range<usize>,
}

/// The beginning of an object: in the text, among the members, and among the names.
#[derive(Clone, Copy)]
pub(super) struct Opened {
    pub(super) at: usize,
    members: usize,
    names: usize,
}

impl OpenObjects {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn open(&mut self, at: usize) -> Opened {
        self.count += 1;
        Opened { at, members: self.members.len(), names: self.names.len() }
    }

    pub(super) fn close(&mut self, object: Opened) {
        self.count -= 1;
        self.members.truncate(object.members);
        self.names.truncate(object.names);
    }

    pub(super) fn has_members(&self, object: Opened) -> bool {
        self.members.len() > object.members
    }

    pub(super) fn begin_member(&mut self, name: &str, at: usize) {
        let from = self.names.len();
        self.names.extend_from_slice(name.as_bytes());
        self.members.push(Member { name: from..self.names.len(), text: at..at });
    }

    /// Call this when no object inside the member's value is open any more.
    pub(super) fn end_member(&mut self, at: usize) {
        if let Some(member) = self.members.last_mut() {
            member.text.end = at;
        }
    }

    /// The name and the text of the member of an object that has exactly one.
    pub(super) fn only_member<'t>(&self, object: Opened, text: &'t [u8]) -> Option<(&[u8], &'t [u8])> {
        let [member] = &self.members[object.members..] else { return None };
        Some((&self.names[member.name.clone()], &text[member.text.clone()]))
    }

    /// Sorts the members of the innermost object. The text ends with its last member.
    pub(super) fn sort(&mut self, object: Opened, text: &mut Vec<u8>) -> Result<(), InvalidBody> {
        let Self { members, names, sorted, .. } = self;
        let members = &mut members[object.members..];
        // The order of UTF-8 bytes is the order of code points.
        let name = |member: &Member| &names[member.name.clone()];
        if members.is_sorted_by(|a, b| name(a) < name(b)) {
            return Ok(());
        }
        members.sort_unstable_by(|a, b| name(a).cmp(name(b)));
        if let Some(pair) = members.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
            return Err(InvalidBody::DuplicateMember(String::from_utf8_lossy(name(&pair[0])).into_owned()));
        }

        sorted.clear();
        sorted.reserve(text.len() - object.at);
        for member in members.iter() {
            sorted.push(if sorted.is_empty() { b'{' } else { b',' });
            sorted.extend_from_slice(&text[member.text.clone()]);
        }
        text.truncate(object.at);
        text.extend_from_slice(sorted);
        Ok(())
    }
}

//! The bytes of the requests that arrive or wait. No place bounds them, because a request has its place only later.
//!
//! One account that stalls many uploads must not fill the memory, nor keep others from uploading. So the bytes of a
//! layer have a bound, and one scope may hold half of it. They count as they arrive: a client can announce any length
//! for nothing. A request that finds no room is refused at once, because half-sent uploads that waited for each other
//! would wait for ever.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Shared by a layer and its clones.
#[derive(Clone, Default)]
pub(super) struct HeldBytes(Arc<Mutex<Counts>>);

#[derive(Default)]
struct Counts {
    all: usize,
    of_scopes: HashMap<Option<Arc<str>>, usize>,
}

/// The bytes that one request holds, for as long as this value lives.
pub(super) struct Hold {
    held: HeldBytes,
    /// Requests without a key share `None`.
    scope: Option<Arc<str>>,
    most: usize,
    bytes: usize,
}

impl HeldBytes {
    /// A request that holds nothing yet, where the layer may hold `most` bytes.
    pub(super) fn hold(&self, scope: Option<&str>, most: usize) -> Hold {
        Hold { held: self.clone(), scope: scope.map(Arc::from), most, bytes: 0 }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hold {
    /// The request holds this number of bytes from now on. `false` if there is no room for them.
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        let added = bytes.saturating_sub(self.bytes);
        let mut counts = self.held.counts();
        let of_scope = counts.of_scopes.get(&self.scope).copied().unwrap_or(0);
        if counts.all.saturating_add(added) > self.most || of_scope.saturating_add(added) > self.most / 2 {
            return false;
        }
        if added > 0 {
            counts.all += added;
            *counts.of_scopes.entry(self.scope.clone()).or_default() += added;
        }
        drop(counts);
        self.bytes += added;
        true
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut counts = self.held.counts();
        counts.all -= self.bytes;
        if let Some(of_scope) = counts.of_scopes.get_mut(&self.scope) {
            *of_scope -= self.bytes;
            if *of_scope == 0 {
                counts.of_scopes.remove(&self.scope);
            }
        }
    }
}

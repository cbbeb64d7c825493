//! What the crate promises, on a real PostgreSQL: one behaviour per test, one theme per file. A folder or file with the
//! name of one in `src` is about it.

mod support;

#[path = "../source/prepared.rs"]
mod prepared;
#[path = "../source/mod.rs"]
mod source;

mod cancellation;
mod database_settings;
mod fingerprint;
mod hostile;
mod janitor;
mod keys;
mod limits;
mod mark;
mod migrations;
mod partitions;
mod plans;
mod squatted;
mod testing;
mod vanished;

mod any_language {
    mod calls;
    mod installed;
    mod mistakes;
    mod roles;
    mod run;
}

mod transaction {
    mod ensure;
    mod handlers;
    mod isolated;
    mod perform;
    mod responses;
    mod round_trips;
}

mod lease {
    mod gone;
    mod granted;
    mod in_doubt;
    pub(crate) mod leases;
    mod panics;
    pub(crate) mod reconcile;
    mod reconcile_ends;
    mod renewal;
    pub(crate) mod resume;
    pub(crate) mod steps;
    mod unbegun;
}

mod claim {
    mod answers;
    mod claims;
    mod doors;
    mod expiry;
    mod newer;
    mod swallowed;
}

mod record {
    mod malformed;
    mod pinned;
    mod rights;
    mod row_security;
    mod statements;
}

mod session {
    mod commit;
    mod foreign;
    mod nested;
    mod own;
    mod places;
}

mod operator {
    mod records;
    pub(crate) mod settle;
}

mod protect {
    mod allowed;
    mod refused;
    mod tables;
}

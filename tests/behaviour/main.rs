//! What the crate promises, on a real PostgreSQL: one behaviour per test, one theme per file, in folders with the names
//! of those in `src`.

mod support;

mod cancellation;
mod database_settings;
mod hostile;
mod keys;
mod migrations;
mod partitions;
mod plans;
mod squatted;

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
    mod ways;
}

mod lease {
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
    mod vanished_network;
}

mod mark {
    mod many;
}

mod claim {
    mod answers;
    mod claims;
    mod doors;
    mod expiry;
    mod newer;
}

mod record {
    mod abandoned;
    mod blank;
    mod decided;
    mod malformed;
    mod operator;
    mod pinned;
    mod row_security;
    mod rules;
    mod statements;
    mod traces;
}

mod session {
    mod commit;
    mod deployment;
    mod foreign;
    mod nested;
    mod own;
}

mod protect {
    mod allowed;
    mod refused;
    mod tables;
}

mod fingerprint {
    mod fingerprints;
}

mod janitor {
    mod sweeps;
    mod vanished;
}

mod testing {
    mod assertions;
    mod time;
}

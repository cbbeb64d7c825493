//! Tests of the HTTP layer, one file per behaviour. Requests go to the service directly, unless the connection matters.

mod any_language;
mod bodies;
mod bounds;
mod by_reference;
mod cancellation;
mod connections;
mod failures;
mod fingerprints;
mod in_flight;
mod leased;
mod mistakes;
mod reconciled;
mod refused;
mod replays;
mod requests;
mod resumed;
mod resumed_races;
mod rules;
mod settings;
mod standards;
mod steps;
mod storms;
mod support;
mod tool_calls;
mod traces;
mod transactional;
mod unbegun;
mod vanished;
mod wire;

use rig::strict;

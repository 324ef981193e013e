//! The HTTP server at the configured `listen` address: the probes, the metrics and the page.

use super::views::Views;
use super::{Settings, measures, page};
use crate::telemetry::Token;
use crate::telemetry::http::{self, Pages};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Serves the configured address, with at most `connections` connections at a time. `None` without
/// an address.
pub(super) fn serve(
    settings: &Settings,
    views: &Views,
    connections: usize,
    not_served: watch::Sender<Option<String>>,
) -> Option<JoinHandle<()>> {
    let address = settings.config.listen?;
    let pages = Pages::new(settings.config.token_file.clone().map(Token::new));
    let scrape = measures::scrape(views.clone(), settings.roots.state.clone());
    let routes = http::routes(scrape, views.ready.clone(), pages.clone())
        .merge(page::routes(views.clone(), pages));
    Some(http::serve(address, routes, connections, not_served))
}

/* How search results are ordered: Sphinx's weights, and more for pages whose title has the words of the query. Without
   it all pages with one of the words in their title have equal scores, and the first by the alphabet wins. */
var Scorer = {
  score: ([, title, , , score]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().trim();
    const words = query.split(/\s+/);
    const name = title.toLowerCase();
    if (words.length < 2 || !words.every((word) => name.includes(word))) return score;
    return score + 30 + (name.includes(query) ? 30 : 0) - name.length / 100;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

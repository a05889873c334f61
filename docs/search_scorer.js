/* How search results are ordered: Sphinx's weights, and more for pages whose title has the words of the query. Without
   it all pages with one of the words in their title have equal scores, and the first by the alphabet wins. */
var Scorer = {
  score: ([, title, , , score]) => {
    const words = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.filter((word) => title.toLowerCase().includes(word)).length;
    return score + (words.length > 1 && found === words.length ? 30 : 0);
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
